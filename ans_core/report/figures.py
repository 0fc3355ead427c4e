"""Draw a training stage's curves.csv and rewards.json as SVG charts."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from ans_core.report import charts
from ans_core.report.files import read_json

SKIPPED = "skipped"
"""Name of the curve that is drawn if a step was skipped."""
OWN_CHART = ("grad_norm", SKIPPED)
LINES_PER_CHART = 6
SCALE = 10.0
"""Curves share an axis if the largest values of one are at most this many times those of another."""
Curve = list[tuple[float, float]]


def curves(folder: Path | None) -> list[Markup]:
    """Draw a chart per group of metrics of similar scale: names with the same first part (`loss/text`,
    `loss/mask`) form a group; each metric that the training loop adds has its own chart."""
    path = folder / "curves.csv" if folder else None
    if not path or not path.exists():
        return []
    read = read_curves(path)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(read):
        group, _, last = name.rpartition("/")
        if last == SKIPPED and not any(value for _, value in read[name]):
            continue
        groups[group if group and last not in OWN_CHART else name].append(name)
    markups = []
    for group, names in sorted(groups.items()):
        for part in by_scale({name: read[name] for name in names}):
            title = group if len(part) > 1 else part[0]
            markups.append(
                Markup(
                    charts.lines(title, {name.removeprefix(group + "/"): sorted(read[name]) for name in part})
                )
            )
    return markups


def read_curves(path: Path) -> dict[str, Curve]:
    by_name: dict[str, Curve] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                by_name[row["name"]].append((float(row["step"]), float(row["value"])))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} line {number}: not a step,name,value row: {row}") from error
    return by_name


def by_scale(named: Mapping[str, Curve]) -> list[list[str]]:
    """Group names of curves that one axis can show, at most LINES_PER_CHART, small scales first; constant
    zeros go with the smallest."""
    largest = {name: max(abs(value) for _, value in curve) for name, curve in named.items()}
    groups: list[list[str]] = []
    unit = 0.0
    for name in sorted(named, key=lambda name: (largest[name], name)):
        if not groups or len(groups[-1]) == LINES_PER_CHART or (unit and largest[name] > SCALE * unit):
            groups.append([])
            unit = 0.0
        groups[-1].append(name)
        unit = unit or largest[name]
    return [sorted(names) for names in groups]


def rewards(folder: Path | None) -> list[Markup]:
    """Draw per reward its mean and spread over the steps, and its histogram in their first and last
    quarter."""
    path = folder / "rewards.json" if folder else None
    if not path or not path.exists():
        return []
    markups = []
    for name, per_step in read_json(path).items():
        steps: list[Sequence[float]] = [step if isinstance(step, list) else [step] for step in per_step]
        quarter = max(1, len(steps) // 4)
        ends = {
            "first quarter": [r for step in steps[:quarter] for r in step],
            "last quarter": [r for step in steps[-quarter:] for r in step],
        }
        markups += [
            Markup(charts.band(f"{name}: reward, mean ± std", steps)),
            Markup(charts.histogram(f"{name}: rewards", ends)),
        ]
    return markups
