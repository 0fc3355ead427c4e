"""Sort metrics, named as `evaluate` writes them, into tables by benchmark, and a headline: a dozen numbers
whose names never change.

`<task>/<split>/<metric>` belongs to the drawn world (`referring/val/gIoU`), `<data set>/<task>/<metric>` to a
user's data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROWS = ("untrained", "base", "sft", "rl")
Summary = dict[str, dict[str, float]]
"""Metrics by row."""

TASKS = {
    "referring": "Referring segmentation",
    "region_caption": "Region captions",
    "grounded_caption": "Grounded captions",
    "video": "Video segmentation",
    "loop1": "Loop 1: mask → caption → mask",
    "loop2": "Loop 2: caption → mask → caption",
}
MAIN = {
    "referring": ("gIoU", "cIoU", "gIoU_shuffled_text", "N_acc", "T_acc"),
    "region_caption": ("METEOR", "exact_match", "CIDEr", "attribute_accuracy"),
    "grounded_caption": ("mIoU_all_objects", "mIoU", "recall_token_f1"),
    "video": ("J&F", "J", "F"),
    "loop1": ("IoU", "IoU_self", "IoU_of_truth"),
    "loop2": ("METEOR", "METEOR_self", "METEOR_of_truth"),
}
"""What the first table shows of a task; every other metric is one click away."""
HEADLINE = {
    "rl": (
        "referring/gIoU", "referring/cIoU", "referring/N_acc", "region_caption/METEOR",
        "region_caption/exact_match", "grounded_caption/mIoU_all_objects", "video/J&F", "loop1/IoU",
        "loop2/METEOR",
    ),
    "sft": ("referring/gIoU", "loop1/IoU", "loop2/METEOR"),
}  # fmt: skip
"""rl: the finished model on every task. sft: the model before RL, on what RL is to raise or keep."""
NOT_A_GRADE = ("samples", "shuffled_text", "of_truth")
"""Metrics with one of these in their name have no best stage."""


@dataclass(frozen=True, kw_only=True)
class MetricName:
    benchmark: str
    """The first two parts: `referring/val`, `photos/referring`."""
    task: str
    """A key of TASKS, or "" for a task that it does not know."""
    metric: str

    @property
    def title(self) -> str:
        """Return e.g. `Referring segmentation · val`, `Referring segmentation · photos`."""
        first, _, second = self.benchmark.partition("/")
        return (
            f"{TASKS[self.task]} · {first if second == self.task else second}"
            if self.task
            else self.benchmark
        )


def parse(name: str) -> MetricName:
    first, _, rest = name.partition("/")
    second, _, metric = rest.partition("/")
    task = second if second in TASKS else first if first in TASKS else ""
    return MetricName(benchmark=f"{first}/{second}", task=task, metric=metric)


def short(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename to `<task>/<metric>`, without data set and split: the mean over the data sets that have it.
    Other names stay."""
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in metrics.items():
        parts = parse(name)
        values[f"{parts.task}/{parts.metric}" if parts.task and parts.metric else name].append(value)
    return {name: sum(listed) / len(listed) for name, listed in values.items()}


def headline(summary: Summary) -> Summary:
    """Return the headline by row. A metric that no data set has is left out."""
    shortened = {row: short(summary.get(row, {})) for row in HEADLINE}
    return {
        row: {name: values[name] for name in HEADLINE[row] if name in values}
        for row, values in shortened.items()
        if values
    }


@dataclass(frozen=True, kw_only=True)
class Table:
    """One benchmark: a line per metric, a cell per row."""

    title: str
    samples: int | None
    lines: list[dict[str, Any]]
    rest: list[dict[str, Any]]


def tables(summary: Summary, rows: Sequence[str] = ROWS) -> list[Table]:
    """Return tables in the order of TASKS, then those of other tasks. `rows`: the columns."""
    benchmarks: dict[str, list[MetricName]] = defaultdict(list)
    for name in sorted({name for metrics in summary.values() for name in metrics}):
        parts = parse(name)
        benchmarks[parts.benchmark].append(parts)
    order = [*TASKS, ""]
    listed = []
    for benchmark, names in sorted(
        benchmarks.items(), key=lambda item: (order.index(item[1][0].task), item[0])
    ):
        there = [name.metric for name in names]
        main = [metric for metric in MAIN.get(names[0].task, there) if metric in there]
        rest = [metric for metric in there if metric not in main]
        counts = [
            metrics[f"{benchmark}/samples"]
            for metrics in summary.values()
            if f"{benchmark}/samples" in metrics
        ]
        listed.append(
            Table(
                title=names[0].title,
                samples=int(counts[-1]) if counts else None,
                lines=[_line(summary, rows, benchmark, metric) for metric in main],
                rest=[_line(summary, rows, benchmark, metric) for metric in rest],
            )
        )
    return listed


def _line(summary: Summary, rows: Sequence[str], benchmark: str, metric: str) -> dict[str, Any]:
    """Make a line. A cell holds the value, its gain on the previous row that has one, and whether it alone is
    the best."""
    values = [summary.get(row, {}).get(f"{benchmark}/{metric}") for row in rows]
    graded = not any(part in metric for part in NOT_A_GRADE)
    best = _single_best(values) if graded else None
    cells: list[dict[str, Any]] = []
    before: float | None = None
    for place, value in enumerate(values):
        gain = (
            value - before if value is not None and before is not None and "samples" not in metric else None
        )
        cells.append(
            {"row": rows[place], "value": value, "gain": gain, "best": place == best, "graded": graded}
        )
        before = before if value is None else value
    return {"name": metric, "cells": cells}


def _single_best(values: Sequence[float | None]) -> int | None:
    """Return the index of the largest of several values; None if another shows the same three digits."""
    shown = [(round(value, 3), place) for place, value in enumerate(values) if value is not None]
    if len(shown) < 2 or sorted(shown)[-1][0] == sorted(shown)[-2][0]:
        return None
    return max(shown)[1]


def named(names: Iterable[str]) -> list[str]:
    """Select the metrics that the first table shows."""
    return [name for name in names if (parts := parse(name)).metric in MAIN.get(parts.task, ())]
