"""Figures and episodes of an agent's rows -> one self-contained page, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ans_core.report import page
from ans_core.report.files import data_uri, read_json

FIRST = (
    "accuracy",
    "RaPR",
    "accuracy_tool",
    "accuracy_no_tool",
    "evidence",
    "calls",
    "valid_calls",
    "over_turn",
    "prior",
)
"""Figures of a family, in the order of the page."""
MEANS = ("needed", "pictures")
"""Means over families stand at the top."""
SHORT = (
    "needed/RaPR",
    "easy/RaPR",
    "pictures/RaPR",
    "needed/evidence",
    "pictures/evidence",
    "needed/faithful_calls",
    "pictures/faithful_calls",
    "needed/prior",
    "pictures/prior",
)
"""Figures that stand under the accuracies at the top of the page."""
REWARDS = {
    "task": "task",
    "evidence": "evidence",
    "coherence": "coherence",
    "price": "needless calls",
    "penalty": "penalties",
}
"""Parts of an episode's reward and what the page calls them."""
Figures = Mapping[str, Mapping[str, float]]
"""Row -> figure -> value."""


def render(profile: str, figures: Figures, albums: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    made = tables(figures)
    return page.render_page(
        "episodes.html.j2", profile=profile, rows=list(figures),
        short=short(figures, [table["title"] for table in made]), tables=made, controls=controls(figures),
        albums=albums, rewards=REWARDS,
    )  # fmt: skip


def short(figures: Figures, groups: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines that the page begins with: every family's accuracy, then SHORT."""
    names = [*(f"{group}/accuracy" for group in groups), *SHORT]
    return [_line(figures, name, name) for name in names if any(name in row for row in figures.values())]


def _line(figures: Figures, name: str, figure: str) -> dict[str, Any]:
    return {"name": name, "cells": [row.get(figure) for row in figures.values()]}


def tables(figures: Figures) -> list[dict[str, Any]]:
    """Return a table for each family: lines of figures, a cell for each row (None: the row lacks it)."""
    names = [name for row in figures.values() for name in row]
    groups = sorted(
        dict.fromkeys(name.rpartition("/")[0] for name in names if name.count("/") == 1),
        key=lambda group: MEANS.index(group) if group in MEANS else len(MEANS),
    )
    listed = []
    for group in groups:
        metrics = dict.fromkeys(
            name.partition("/")[2] for name in names if name.count("/") == 1 and name.startswith(f"{group}/")
        )
        order = [
            *(name for name in FIRST if name in metrics),
            *(name for name in metrics if name not in FIRST),
        ]
        listed.append({"title": group, "lines": [_line(figures, name, f"{group}/{name}") for name in order]})
    return listed


def controls(figures: Figures) -> list[dict[str, Any]]:
    """Return lines of the accuracy under every control: where a call is needed first, then by control and
    family."""
    wanted = dict.fromkeys(
        name
        for row in figures.values()
        for name in row
        if name.count("/") == 2 and name.endswith("/accuracy")
    )
    ordered = sorted(wanted, key=lambda name: name.split("/")[1] not in MEANS)
    return [_line(figures, name.removesuffix("/accuracy"), name) for name in ordered]


def album(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a folder of episodes with their pictures as data; none where there is no such
    folder."""
    if not folder.is_dir():
        return []
    records: list[dict[str, Any]] = read_json(folder / "episodes.json")
    for record in records:
        record["pictures"] = [data_uri(folder / name) for name in record["pictures"]]
        for turn in record["turns"]:
            turn["pictures"] = [data_uri(folder / name) for name in turn.get("pictures", ())]
            turn["masks"] = [
                still | {"picture": data_uri(folder / still["picture"])} for still in turn.get("masks", ())
            ]
    return records
