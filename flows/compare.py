"""Compare two results (a summary, a folder of runs, a git revision, an MLflow run): a table of their metrics and the differences."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

from ans_core.report.metrics import short
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
    elif is_revision(name, root):
        found = of_revision(name, root)
    else:
        found = of_mlflow_run(name, root)
    if not found:
        raise FileNotFoundError(f"{name!r} has no metrics: no stage of it has finished")
    return found


def of_folder(folder: Path) -> Metrics:
    """Return the metrics of runs/<profile>: what `evaluate` wrote last, even if the report is older."""
    files = {row: folder / "evaluate" / row / "metrics.json" for row in ROWS}
    there = {row: json.loads(file.read_text(encoding="utf-8")) for row, file in files.items() if file.exists()}
    if not there:
        raise FileNotFoundError(f"{folder} {WHAT}: it has no evaluate/<{'|'.join(ROWS)}>/metrics.json")
    return flat_metrics(there)


def is_revision(name: str, root: Path) -> bool:
    return git(root, "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}").returncode == 0


def of_revision(name: str, root: Path) -> Metrics:
    """Return every metric if the DVC cache has them, else the headline, which git keeps."""
    import dvc.api

    try:
        return flat_metrics(dvc.api.metrics_show(SUMMARY, repo=str(root), rev=name))
    except FileNotFoundError:
        shown = git(root, "show", f"{name}:{HEADLINE}")
    if shown.returncode:
        raise FileNotFoundError(
            f"{name}: no {SUMMARY} of that revision in the DVC cache (`dvc pull`, or run the pipeline there), and no {HEADLINE} in git"
        )
    return flat_metrics(json.loads(shown.stdout))


def git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)


def of_mlflow_run(name: str, root: Path) -> Metrics:
    """Return the metrics of the stages of a pipeline run; for a repeated stage, those of the later try."""
    from mlflow.exceptions import MlflowException

    from tasks.tracking import client

    mlflow = client(root)
    try:
        run = mlflow.get_run(name)
    except MlflowException:
        raise FileNotFoundError(f"{name!r} {WHAT}") from None
    where = f"tags.`mlflow.parentRunId` = '{name}'"
    stages = mlflow.search_runs([run.info.experiment_id], where, max_results=1000, order_by=["attributes.start_time ASC"])
    if not stages:
        return dict(run.data.metrics)
    return {stage_metric(stage.data.tags["ans.stage"], key): value for stage in stages for key, value in stage.data.metrics.items()}


def stage_metric(stage: str, name: str) -> str:
    """Name a metric `rl/referring/val/gIoU`, as the summary does, if `evaluate@rl` or the report measured it; else `sft: loss`."""
    task, _, row = stage.partition("@")
    if task == "report" and name.partition("/")[0] in ROWS:
        return name
    return f"{stage}: {name}" if not row or name == "duration_s" else f"{row}/{name.removeprefix('eval/')}"


def table(one: str, other: str, root: Path) -> str:
    """Return one line per metric, with `-` where one result lacks it. Raises ValueError if they have none in common."""
    left, right = in_common(metrics_of(one, root), metrics_of(other, root))
    if not left.keys() & right.keys():
        raise ValueError(
            f"{one} and {other} have no metric in common: {', '.join(sorted(left)[:3])} ... and {', '.join(sorted(right)[:3])} ..."
        )
    width = max(len(name) for name in {*left, *right})
    lines = [f"{'metric':<{width}}  {one[-12:]:>12}  {other[-12:]:>12}  {'difference':>12}"]
    for name in sorted({*left, *right}):
        a, b = left.get(name), right.get(name)
        cells = ["-" if value is None else f"{value:.4f}" for value in (a, b)]
        difference = "-" if a is None or b is None else f"{b - a:+.4f}"
        lines.append(f"{name:<{width}}  {cells[0]:>12}  {cells[1]:>12}  {difference:>12}")
    return "\n".join(lines)


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
