"""Compare two results (a summary, a folder of runs, a git revision, an MLflow run): a table of their metrics and the differences."""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ans_core.report.metrics import short
from ans_core.report.runs import Run
from flows.results import git, is_checkpoint, results, revision_of, stage_runs
from tasks.stages import HEADLINE, ROWS, SUMMARY
from tasks.tracking import metric_name

Metrics = dict[str, float]
WHAT = "is no summary.json, no folder like runs/<profile>, no git revision and no MLflow run id"


def flat_metrics(values: dict[str, Any], prefix: str = "") -> Metrics:
    found: Metrics = {}
    for key, value in values.items():
        found |= flat_metrics(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: float(value)}
    return found


def metrics_of(name: str, root: Path) -> Metrics:
    """Return a result's metrics. Raises FileNotFoundError if `name` is nothing that has metrics."""
    path = Path(name)
    if path.is_file():
        found = flat_metrics(json.loads(path.read_text(encoding="utf-8")))
    elif path.is_dir():
        found = of_folder(path)
    elif revision := revision_of(name, root):
        found = of_revision(revision, root)
    else:
        found = of_mlflow_run(name, root)
    if not found:
        raise FileNotFoundError(f"{name!r} has no metrics: no stage of it has finished")
    return found


def of_folder(folder: Path) -> Metrics:
    """Return the metrics of one evaluation, or of runs/<profile>: what `evaluate` wrote last, even if the report is older."""
    if (folder / "metrics.json").exists():
        return flat_metrics(json.loads((folder / "metrics.json").read_text(encoding="utf-8")))
    files = {row: folder / "evaluate" / row / "metrics.json" for row in ROWS}
    there = {row: json.loads(file.read_text(encoding="utf-8")) for row, file in files.items() if file.exists()}
    if not there:
        raise FileNotFoundError(f"{folder} {WHAT}: it has no evaluate/<{'|'.join(ROWS)}>/metrics.json")
    return flat_metrics(there)


def of_revision(name: str, root: Path) -> Metrics:
    """Return every metric if the DVC cache has them, else the headline, which git keeps."""
    import dvc.api

    try:
        return flat_metrics(dvc.api.metrics_show(SUMMARY, repo=str(root), rev=name))
    except FileNotFoundError:
        shown = git(root, "show", f"{name}:{HEADLINE}")
    if not shown:
        raise FileNotFoundError(
            f"{name}: no {SUMMARY} of that revision in the DVC cache (`dvc pull`, or run the pipeline there), and no {HEADLINE} in git"
        )
    return flat_metrics(json.loads(shown))


def of_mlflow_run(name: str, root: Path) -> Metrics:
    """Return the metrics of the stages of a pipeline run, those that came from the cache too."""
    parent, stages = stage_runs(name, root)
    if not stages:
        return dict(parent.data.metrics)
    return {stage_metric(stage, key): value for stage, run in stages.items() for key, value in run.data.metrics.items()}


def stage_metric(stage: str, name: str) -> str:
    """Name a metric `rl/referring/val/gIoU`, as the summary does, if `evaluate@rl` or the report measured it; else `sft: loss`."""
    task, _, row = stage.partition("@")
    if task == "report" and name.partition("/")[0] in ROWS:
        return name
    return f"{stage}: {name}" if not row or name == "duration_s" else f"{row}/{name.removeprefix('eval/')}"


def compare(arguments: argparse.Namespace, root: Path) -> None:
    """Print settings that differ, changes with intervals and all metrics, and write the page. Two folders of `ans eval BENCHMARK` get the
    page of that benchmark."""
    from ans_core.evaluation import compare as eval_compare

    names = arguments.names
    if len(names) < 2:
        raise ValueError(f"ans compare takes two results or more, not {len(names)}; the first is what the others are compared with")
    if all((Path(name) / "metrics.samples.jsonl").exists() for name in names):
        eval_compare.compare(names, arguments.out)
        return
    if any(Path(name).is_file() for name in names):  # a summary.json has nothing else
        print("\n\n".join(table(names[0], other, root) for other in names[1:]))
        return
    runs = results(names, root)
    print("\n".join([*(f"{run.name}: {run.told}" for run in runs), *settings_lines(runs), *change_lines(runs)]))
    places = [str(run.folder) if is_checkpoint(Path(name)) else name for name, run in zip(names, runs, strict=True)]
    others = zip(places[1:], runs[1:], strict=True)
    print("\n" + "\n\n".join(table(places[0], other, root, titles=(runs[0].name, run.name)) for other, run in others))
    print("\npage:", write_page(runs, arguments.out or root / ".ans/compare" / page_name(runs), root))


def page_name(runs: Sequence[Run]) -> str:
    """Return a folder's name that an address may hold as it is."""
    return "-".join(re.sub(r"[^\w.,=-]+", "_", run.name) for run in runs)[:100]


def write_page(runs: Sequence[Run], out: Path, root: Path) -> Path:
    """Write the page. Pictures come from the data set of a run that has one in its folder, else of the checkout's own."""
    from ans_core.config import load
    from ans_core.report.runs import write

    config = load(root / "params.yaml")
    places = [folder / "data" for run in runs for folder in (run.folder, *run.folder.parents[:2])]
    prepared = [place for place in (*places, root / "runs" / config.profile / "data") if (place / "datasets.json").exists()]
    split = next((run.settings["evaluate.split"] for run in runs if "evaluate.split" in run.settings), config.evaluate.split)
    return write(out, runs, data=next(iter(prepared), None), split=split, sources=config.evaluate.sources)


def settings_lines(runs: Sequence[Run]) -> list[str]:
    from ans_core.report.runs import differing

    found = differing(runs)
    return ["", "settings that differ:", *(f"  {key}: {' | '.join(values)}" for key, values in found.items())] if found else []


def change_lines(runs: Sequence[Run]) -> list[str]:
    """Return the changes of every row against the first run, with intervals."""
    from ans_core.report.page import change_table
    from ans_core.report.runs import all_changes

    lines = []
    for row, name, changes in all_changes(runs):
        lines += ["", f"{name}{f', {row},' if row else ''} against {runs[0].name}", *change_table(changes)]
    return lines


def table(one: str, other: str, root: Path, *, titles: tuple[str, str] | None = None) -> str:
    """Return one line per metric that differs in its four digits, with `-` where one result lacks it, and how many do not. titles: of
    the columns; None is the results' own names. Raises ValueError if they have none in common."""
    left, right = in_common(metrics_of(one, root), metrics_of(other, root))
    if not left.keys() & right.keys():
        raise ValueError(
            f"{one} and {other} have no metric in common: {', '.join(sorted(left)[:3])} ... and {', '.join(sorted(right)[:3])} ..."
        )
    heads = titles or (one[-12:], other[-12:])
    names, cells = sorted({*left, *right}), {}
    for name in names:
        a, b = left.get(name), right.get(name)
        values = ["-" if value is None else f"{value:.4f}" for value in (a, b)]
        if values[0] != values[1]:
            cells[name] = (*values, "-" if a is None or b is None else f"{b - a:+.4f}")
    same = [f"{len(names) - len(cells)} of {len(names)} metrics are the same to four digits"] if len(cells) < len(names) else []
    if not cells:
        return same[0]
    width, wide = max(map(len, cells)), max(12, *map(len, heads))
    rows = {"metric": (*heads, "difference"), **cells}
    return "\n".join([*(f"{n:<{width}}  {a:>{wide}}  {b:>{wide}}  {d:>12}" for n, (a, b, d) in rows.items()), *same])


def in_common(left: Metrics, right: Metrics) -> tuple[Metrics, Metrics]:
    """Return both results under the same names: with one spelling (MLflow's J_F is J&F). For different splits, or a headline and a summary,
    drop the split from the names and keep only what both have."""
    spelt = {metric_name(name): name for name in (*left, *right) if metric_name(name) != name}
    left, right = ({spelt.get(name, name): value for name, value in found.items()} for found in (left, right))
    if left.keys() & right.keys():
        return left, right
    left, right = without_splits(left), without_splits(right)
    both = left.keys() & right.keys()
    return ({name: left[name] for name in both}, {name: right[name] for name in both}) if both else (left, right)


def without_splits(found: Metrics) -> Metrics:
    by_row: dict[str, Metrics] = defaultdict(dict)
    for name, value in found.items():
        row, _, rest = name.partition("/")
        by_row[row][rest] = value
    return {f"{row}/{name}": value for row, metrics in by_row.items() for name, value in short(metrics).items()}
