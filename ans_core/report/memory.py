"""Figures, curves and clips of the stage `memory` -> one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ans_core.report import charts, page
from ans_core.report import figures as drawn
from ans_core.report.files import clips, read_json

SCORE, AT, CURVE = "J&F", "J_at_", "memory/val_"
"""The score, the beginning of J's names by distance, and that of the names of validation's curves."""
ROWS = {"base": SCORE, "before training": "J&F/before", "best epoch": "J&F/best"}
"""What the page calls a score; "base" is that of a stage that only validates."""
Figures = Mapping[str, float]


def figures_of(folder: Path) -> dict[str, float]:
    """Read the stage's metrics. Raises ValueError for a stage that passed the base through."""
    file = folder / "metrics.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no {file.name}: it passed the base through; set memory.train=true, or "
            "memory.validate_only=true"
        )
    return {name: float(value) for name, value in read_json(file).items()}


def render(profile: str, folder: Path, figures: Figures) -> str:
    return page.render_page(
        "memory.html.j2", profile=profile, lines=lines(figures), figures=figures,
        distances=distances(folder, figures), curves=drawn.curves(folder), clips=clips(folder),
    )  # fmt: skip


def lines(figures: Figures) -> list[dict[str, Any]]:
    """Return J&F with and without memory, and the difference, of everything that was measured."""
    rows = []
    for row, name in ROWS.items():
        if name in figures:
            with_memory, alone = figures[name], figures[f"{name}_without_memory"]
            rows.append({"name": row, "with": with_memory, "without": alone, "worth": with_memory - alone})
    return rows


def distances(folder: Path, figures: Figures) -> Markup | None:
    """Draw J by the frames since the prompt: of the base that was validated, or of the first and the best
    epoch. None where no epoch is."""
    shown = {"base": _by_distance(figures)} if SCORE in figures else _of_epochs(folder, figures["J&F/best"])
    shown = {name: curve for name, curve in shown.items() if curve}
    return Markup(charts.lines("J by distance", shown, along="frames after the prompt")) if shown else None


def _by_distance(named: Figures) -> list[tuple[float, float]]:
    return sorted(
        (float(name.removeprefix(AT)), value) for name, value in named.items() if name.startswith(AT)
    )


def _of_epochs(folder: Path, best: float) -> dict[str, list[tuple[float, float]]]:
    curves = drawn.read_curves(folder / "curves.csv")
    scores = curves.get(CURVE + SCORE, [])
    at = {
        step: {name.removeprefix(CURVE): dict(curve).get(step) for name, curve in curves.items()}
        for step, _ in scores
    }
    by_step = {
        step: _by_distance({name: value for name, value in at_step.items() if value is not None})
        for step, at_step in at.items()
    }
    epochs = {"first epoch": by_step[scores[0][0]]} if scores else {}
    # the file has six digits
    highest = [step for step, score in scores[1:] if abs(score - best) <= 1e-5 * best]
    return epochs | ({"best epoch": by_step[highest[0]]} if highest else {})
