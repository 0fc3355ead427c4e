"""Two results (summary.json, git revision, MLflow run) in, a table of their metrics and the differences out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from flows.paths import environment
from tasks.stages import SUMMARY


def flat_metrics(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in values.items():
        found |= flat_metrics(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: float(value)}
    return found


def metrics_of(name: str, root: Path) -> dict[str, float]:
    if Path(name).is_file():
        return flat_metrics(json.loads(Path(name).read_text(encoding="utf-8")))
    if is_revision(name, root):
        command = [sys.executable, "-m", "dvc", "metrics", "show", "--json", "--all-commits"]
        shown = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, check=True).stdout
        commit = subprocess.run(["git", "rev-parse", name], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        by_revision = {key: value for key, value in json.loads(shown).items() if commit.startswith(key) or key == name}
        files = next(iter(by_revision.values()))["data"] if by_revision else {}
        if "data" not in files.get(SUMMARY, {}):
            raise FileNotFoundError(f"{name}: no {SUMMARY} of that revision in the DVC cache: `dvc pull`, or run the pipeline there")
        return flat_metrics(files[SUMMARY]["data"])
    from mlflow.exceptions import MlflowException

    from tasks.tracking import client

    try:
        return dict(client(root).get_run(name).data.metrics)
    except MlflowException:
        raise FileNotFoundError(f"{name!r} is no summary.json, no git revision and no MLflow run id") from None


def is_revision(name: str, root: Path) -> bool:
    done = subprocess.run(["git", "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"], cwd=root, capture_output=True, check=False)
    return done.returncode == 0


def table(one: str, other: str, root: Path) -> str:
    left, right = metrics_of(one, root), metrics_of(other, root)
    width = max((len(name) for name in {*left, *right}), default=6)
    lines = [f"{'metric':<{width}}  {one[-12:]:>12}  {other[-12:]:>12}  {'difference':>12}"]
    for name in sorted({*left, *right}):
        a, b = left.get(name), right.get(name)
        cells = ["-" if value is None else f"{value:.4f}" for value in (a, b)]
        difference = "-" if a is None or b is None else f"{b - a:+.4f}"
        lines.append(f"{name:<{width}}  {cells[0]:>12}  {cells[1]:>12}  {difference:>12}")
    return "\n".join(lines)
