"""Results of two or more runs in, one page out: what changed and how certain that is, settings, metrics,
answers to the same samples, curves over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from ans_core.config import DataSource
from ans_core.report import charts, gallery, metrics, page
from ans_core.report.changes import Answers, Change, changes, paired, read_answers, verdict
from ans_core.report.figures import Curve, read_curves
from ans_core.report.files import read_json
from ans_core.report.lookup import samples_of
from ans_core.report.metrics import ROWS, Summary

TRAINED = ("base", "memory", "sft", "rl")
NOT_COMPARED = ("_min", "_max", "_std", "skipped")
"""Ends of the names of curves that are not drawn over each other."""
PICTURES = 48


@dataclass(frozen=True, kw_only=True)
class Run:
    """A folder laid out as runs/<profile>, or one evaluation (metrics.json, predictions.jsonl)."""

    name: str
    description: str
    """What it is, in words."""
    folder: Path
    settings: Mapping[str, str]
    """By dotted name; empty: not known."""
    recorded: Mapping[str, float] = field(default_factory=dict)
    """Metrics that are in no folder: a commit's headline."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics by `<row>/<name>`; those of one evaluation by their names."""
        files = {row: read_json(folder / "metrics.json") for row, folder in self.evaluated.items()}
        return self.recorded or {
            f"{row}/{key}".lstrip("/"): float(value)
            for row, values in files.items()
            for key, value in values.items()
        }

    @cached_property
    def evaluated(self) -> dict[str, Path]:
        """Return its evaluations by row; one evaluation has the row ""."""
        if (self.folder / "metrics.json").exists():
            return {"": self.folder}
        return {
            row: self.folder / "evaluate" / row
            for row in ROWS
            if (self.folder / "evaluate" / row / "metrics.json").exists()
        }


def rows_of(runs: Sequence[Run]) -> list[tuple[str, list[Path]]]:
    """Return what is compared, the last stage first: (row, a folder of each run). Where one is a single
    evaluation, it is compared with the others' last row."""
    if any("" in run.evaluated for run in runs):
        return (
            [("", [list(run.evaluated.values())[-1] for run in runs])]
            if all(run.evaluated for run in runs)
            else []
        )
    common = [row for row in reversed(ROWS) if all(row in run.evaluated for run in runs)]
    return [(row, [run.evaluated[row] for run in runs]) for row in common]


def read(runs: Sequence[Run], folders: Sequence[Path]) -> tuple[Summary, dict[str, Answers]]:
    """Return metrics and scores by run."""
    read = {run.name: read_json(folder / "metrics.json") for run, folder in zip(runs, folders, strict=True)}
    summary = {
        name: {metric: float(value) for metric, value in metrics.items()} for name, metrics in read.items()
    }
    return summary, {run.name: read_answers(folder) for run, folder in zip(runs, folders, strict=True)}


def all_changes(runs: Sequence[Run]) -> list[tuple[str, str, list[Change]]]:
    """Return (row, run, its changes against the first run) for every row and other run with metrics in
    common."""
    listed = []
    for row, folders in rows_of(runs):
        summary, answers = read(runs, folders)
        listed += [(row, run.name, changes(summary, answers, runs[0].name, run.name)) for run in runs[1:]]
    return [(row, name, changed) for row, name, changed in listed if changed]


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs whose settings are known."""
    with_settings = [run for run in runs if run.settings]
    keys = sorted({key for run in with_settings for key in run.settings}) if len(with_settings) > 1 else []
    values = {key: [run.settings.get(key, "–") for run in runs] for key in keys}
    return {
        key: listed
        for key, listed in values.items()
        if len({run.settings.get(key) for run in with_settings}) > 1
    }


def write(
    out: Path, runs: Sequence[Run], *, data: Path | None, split: str, sources: Sequence[DataSource]
) -> Path:
    """Write the page. `data` (a prepared folder), `split` and `sources` tell where the pictures and masks of
    the samples are."""
    names = [run.name for run in runs]
    compared = rows_of(runs)
    summary, answers = read(runs, compared[0][1]) if compared else ({}, {})
    galleries, lost = (
        _galleries(runs, compared[0][1], answers, data, split, sources) if compared else ({}, {})
    )
    first = names[0]
    steps = [
        verdict(f"{name}{f', {row}' if row else ''}", first, name, changed) | {"row": row}
        for row, name, changed in all_changes(runs)
    ]
    row = compared[0][0] if compared else ""
    curves = {stage: over_each_other(stage, runs) for stage in TRAINED}
    return write_page(out, runs, steps, summary, row=row, galleries=galleries, lost=lost, curves=curves)


def write_page(
    out: Path,
    runs: Sequence[Run],
    steps: Sequence[Mapping[str, Any]],
    summary: Summary,
    *,
    galleries: Mapping[str, Sequence[Mapping[str, Any]]],
    lost: Mapping[str, str],
    row: str = "",
    curves: Mapping[str, Sequence[Markup]] = MappingProxyType({}),
    notes: Sequence[str] = (),
) -> Path:
    """Write the page of a comparison of any results. steps: the verdicts (`changes.verdict`, with the row
    that each is about); galleries: pictures by the run that they are of; lost: why there are none."""
    names = [run.name for run in runs]
    text = page.render_page(
        page.RUNS,
        names=names,
        told={run.name: run.description for run in runs},
        steps=steps,
        row=row,
        tables=metrics.tables(summary, names),
        settings=differing(runs),
        known=[run.name for run in runs if run.settings],
        galleries=galleries,
        lost=lost,
        curves=curves,
        notes=notes,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "page.html").write_text(text, encoding="utf-8")
    return out / "page.html"


def _galleries(
    runs: Sequence[Run],
    folders: Sequence[Path],
    answers: dict[str, Answers],
    data: Path | None,
    split: str,
    sources: Sequence[DataSource],
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Return the samples that changed most between the first run and each other one."""
    first, *others = [run.name for run in runs]
    both = {name: _shared(answers[first], answers[name]) for name in others}
    chosen = {
        name: gallery.choose(answers[first], shared, PICTURES // len(others)) for name, shared in both.items()
    }
    wanted = {key for name, listed in chosen.items() for key in gallery.wanted(listed, answers[name])}
    samples, lost = samples_of(wanted, prepared=data, split=split, sources=sources)
    lost |= {
        name: f"it was evaluated on other samples than {first}" for name, shared in both.items() if not shared
    }
    place = dict(zip((first, *others), folders, strict=True))
    pictures = {
        name: gallery.pictures({first: place[first], name: place[name]}, listed, samples)
        for name, listed in chosen.items()
    }
    order = {name: sorted(shown, key=lambda one: -abs(one["gain"] or 0)) for name, shown in pictures.items()}
    return order, lost


def _shared(before: Answers, after: Answers) -> Answers:
    """Return the answers to samples that both have."""
    pairs = {benchmark: paired(before.get(benchmark, {}), answered) for benchmark, answered in after.items()}
    return {
        benchmark: {key: after[benchmark][key] for key in keys} for benchmark, keys in pairs.items() if keys
    }


def over_each_other(stage: str, runs: Sequence[Run]) -> list[Markup]:
    """Draw a chart for every curve that several runs have and that is not the same in all of them."""
    files = {run.name: run.folder / stage / "curves.csv" for run in runs}
    read = {name: read_curves(file) for name, file in files.items() if file.exists()}
    if len(read) < 2:
        return []
    common = sorted(set.intersection(*(set(curves) for curves in read.values())))
    markups = []
    for name in (name for name in common if not name.endswith(NOT_COMPARED)):
        curves: dict[str, Curve] = {run: sorted(of_run[name]) for run, of_run in read.items()}
        if len({tuple(curve) for curve in curves.values()}) > 1:
            markups.append(Markup(charts.lines(name, curves)))
    return markups
