"""Render the content of a page as HTML: one file that loads nothing from elsewhere."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from ans_core.report.changes import Change


def render(**shown: Any) -> str:
    return render_page("page.html.j2", js=Markup(_file("page.js")), **shown)


def render_page(template: str, **shown: Any) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"figure": figure, "interval": interval, "place": place}
    return environment.from_string(_file(template)).render(css=Markup(_file("page.css")), **shown)


def _file(name: str) -> str:
    return resources.files("ans_core.report").joinpath(name).read_text(encoding="utf-8")


def figure(value: float | None, signed: bool = False) -> str:
    """Format three digits, or a whole number as it is; – without a value."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) > 1:
        return f"{int(value):+d}" if signed else f"{int(value)}"
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    return text.replace("-", "\N{MINUS SIGN}")


def interval(change: Change) -> str:
    """Format `+0.004 to +0.020`."""
    return f"{figure(change.interval[0], True)} to {figure(change.interval[1], True)}" if change.interval else "–"


def place(change: Change, changes: list[Change]) -> str:
    """Return CSS lengths of the interval and the difference on an axis that all changes share, with 0 in its middle."""
    ends = [abs(end) for c in changes for end in (*(c.interval or ()), c.difference)]
    reach = max(ends) or 1.0
    low, high = change.interval or (change.difference, change.difference)
    at = {"from": low, "to": high, "at": change.difference}
    return "; ".join(f"--{name}: {50 + 50 * value / reach:.1f}%" for name, value in at.items())
