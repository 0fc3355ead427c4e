"""Compare results (flows/results.py): settings that differ, changes with intervals, a table of all metrics,
and the page."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ans_core.report.changes import Change, changes, read_answers
from ans_core.report.files import read_json
from ans_core.report.metrics import short
from ans_core.report.runs import Run
from flows.child import run_once
from flows.results import results
from tasks.stages import ROWS

Metrics = Mapping[str, float]


def compare(arguments: argparse.Namespace, root: Path) -> None:
    """Print settings that differ, changes with intervals and all metrics, and write the page. Two folders of
    `ans eval BENCHMARK` get the page of that benchmark."""
    from ans_core.evaluation import compare as eval_compare

    names = arguments.names
    if len(names) < 2:
        raise ValueError(
            f"ans compare takes two results or more, not {len(names)}; the first is what the others are "
            "compared with"
        )
    if all((Path(name) / "metrics.samples.jsonl").exists() for name in names):
        eval_compare.compare(names, arguments.out)
        return
    runs = results(names, root)
    described = [f"{run.name}: {run.description}" for run in runs]
    print("\n".join([*described, *settings_lines(runs), *change_lines(runs), ""]))
    print("\n\n".join(table(runs[0], other) for other in runs[1:]))
    print("\npage:", write_page(runs, arguments.out or root / ".ans/compare" / page_name(runs), root))


def folder_changes(before: Path, after: Path) -> list[Change]:
    """Return the changes from one evaluation's folder to another's."""
    folders = {"before": before, "after": after}
    summary = {name: read_json(folder / "metrics.json") for name, folder in folders.items()}
    answers = {name: read_answers(folder) for name, folder in folders.items()}
    return changes(summary, answers, "before", "after")


def page_in_child(names: Sequence[str], folder: Path, here: Path) -> Path | None:
    """Write the page of these results in a process of its own; None if that fails."""
    words = ["-m", "flows.cli", "compare", *names, "--out", str(folder)]
    failed = run_once(words, root=here, timeout_s=3600, say=lambda lines: None)
    return None if failed else folder / "page.html"


def page_name(runs: Sequence[Run]) -> str:
    """Return a folder's name that an address may hold as it is."""
    return "-".join(re.sub(r"[^\w.,=-]+", "_", run.name) for run in runs)[:100]


def write_page(runs: Sequence[Run], out: Path, root: Path) -> Path:
    """Write the page. Pictures come from the data set of a run that has one in its folder, else of the
    checkout's own."""
    from ans_core.config import load
    from ans_core.report.runs import write

    config = load(root / "params.yaml")
    places = [folder / "data" for run in runs for folder in (run.folder, *run.folder.parents[:2])]
    prepared = [
        place
        for place in (*places, root / "runs" / config.profile / "data")
        if (place / "datasets.json").exists()
    ]
    split = next(
        (run.settings["evaluate.split"] for run in runs if "evaluate.split" in run.settings),
        config.evaluate.split,
    )
    return write(out, runs, data=next(iter(prepared), None), split=split, sources=config.evaluate.sources)


def settings_lines(runs: Sequence[Run]) -> list[str]:
    from ans_core.report.runs import differing

    differences = differing(runs)
    return (
        [
            "",
            "settings that differ:",
            *(f"  {key}: {' | '.join(values)}" for key, values in differences.items()),
        ]
        if differences
        else []
    )


def change_lines(runs: Sequence[Run]) -> list[str]:
    """Return the changes of every row against the first run, with intervals."""
    from ans_core.report.page import change_table
    from ans_core.report.runs import all_changes

    lines = []
    for row, name, changed in all_changes(runs):
        lines += ["", f"{name}{f', {row},' if row else ''} against {runs[0].name}", *change_table(changed)]
    return lines


def table(one: Run, other: Run) -> str:
    """Return one line per metric that differs in its four digits, with `-` where one result lacks it, and how
    many do not. Raises ValueError if they have none in common, and FileNotFoundError for a result without
    any."""
    for run in (one, other):
        if not run.metrics:
            raise FileNotFoundError(
                f"{run.description} has no metrics: no evaluate/<{'|'.join(ROWS)}>/metrics.json, and no "
                "metrics.json"
            )
    left, right = in_common(one.metrics, other.metrics)
    if not left.keys() & right.keys():
        some, others = (", ".join(sorted(metrics)[:3]) for metrics in (left, right))
        raise ValueError(f"{one.name} and {other.name} have no metric in common: {some} ... and {others} ...")
    heads = (one.name, other.name)
    names, cells = sorted({*left, *right}), {}
    for name in names:
        a, b = left.get(name), right.get(name)
        values = ["-" if value is None else f"{value:.4f}" for value in (a, b)]
        if values[0] != values[1]:
            cells[name] = (*values, "-" if a is None or b is None else f"{b - a:+.4f}")
    same = (
        [f"{len(names) - len(cells)} of {len(names)} metrics are the same to four digits"]
        if len(cells) < len(names)
        else []
    )
    if not cells:
        return same[0]
    width, wide = max(map(len, cells)), max(12, *map(len, heads))
    rows = {"metric": (*heads, "difference"), **cells}
    return "\n".join(
        [*(f"{n:<{width}}  {a:>{wide}}  {b:>{wide}}  {d:>12}" for n, (a, b, d) in rows.items()), *same]
    )


def in_common(left: Metrics, right: Metrics) -> tuple[Metrics, Metrics]:
    """Return both results under the same names: for different splits, or beside a commit's headline, drop
    the split from the names and keep only what both have."""
    if left.keys() & right.keys():
        return left, right
    left, right = without_splits(left), without_splits(right)
    both = left.keys() & right.keys()
    return (
        ({name: left[name] for name in both}, {name: right[name] for name in both}) if both else (left, right)
    )


def without_splits(figures: Metrics) -> Metrics:
    by_row: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in figures.items():
        row, _, rest = name.partition("/")
        by_row[row][rest] = value
    return {
        f"{row}/{name}": value for row, metrics in by_row.items() for name, value in short(metrics).items()
    }
