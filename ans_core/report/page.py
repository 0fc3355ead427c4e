"""Render the content of a page as HTML: one file that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from ans_core.report.changes import Change

RUN, RUNS, PARTS = "page.html.j2", "runs.html.j2", "parts.html.j2"
"""The report of a run, the comparison of several, and the macros that both import."""
MAX_SAME = 4
"""Figures that did not change which a table of changes names."""


def render_page(template: str, **shown: Any) -> str:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_file),
    )
    environment.filters |= {"figure": figure, "interval": interval, "place": place}
    environment.globals |= {"css": Markup(_file("page.css")), "js": Markup(_file("page.js")), "zip": zip}
    return environment.get_template(template).render(**shown)


def _file(name: str) -> str:
    return resources.files("ans_core.report").joinpath(name).read_text(encoding="utf-8")


def figure(value: float | int | None, signed: bool = False) -> str:
    """Format three digits, or a whole number as it is; – without a value."""
    if value is None:
        return "–"
    if isinstance(value, int) or (value == int(value) and abs(value) > 1):
        return f"{int(value):+d}" if signed else f"{int(value)}"
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    return text.replace("-", "\N{MINUS SIGN}")


def interval(change: Change) -> str:
    """Format `+0.004 to +0.020`."""
    return (
        f"{figure(change.interval[0], True)} to {figure(change.interval[1], True)}"
        if change.interval
        else "–"
    )


def change_table(changes: Sequence[Change]) -> list[str]:
    """Return a line per figure whose three digits, or verdict, say that it changed, and one of the others,
    with the first few values."""

    def has_moved(change: Change) -> bool:
        return figure(change.before) != figure(change.after) or change.verdict in ("better", "worse")

    moved = [change for change in changes if has_moved(change)]
    same = [f"{c.title}, {c.metric} {figure(c.after)}" for c in changes if not has_moved(c)]
    lines = [f"  {'':<60} {'before':>7} {'after':>7} {'change':>7}  95 % interval"] if moved else []
    for change in moved:
        values = f"{figure(change.before):>7} {figure(change.after):>7} {figure(change.difference, True):>7}"
        lines.append(
            f"  {f'{change.title}, {change.metric}':<60} {values}  {interval(change):<18} {change.verdict}"
        )
    more = f"; and {len(same) - MAX_SAME} more" if len(same) > MAX_SAME else ""
    return lines + ([f"  the same: {'; '.join(same[:MAX_SAME])}{more}"] if same else [])


def place(change: Change, changes: list[Change]) -> str:
    """Return CSS lengths of the interval and the difference on an axis that all changes share, with 0 in its
    middle."""
    ends = [abs(end) for c in changes for end in (*(c.interval or ()), c.difference)]
    reach = max(ends) or 1.0
    low, high = change.interval or (change.difference, change.difference)
    at = {"from": low, "to": high, "at": change.difference}
    return "; ".join(f"--{name}: {50 + 50 * value / reach:.1f}%" for name, value in at.items())
