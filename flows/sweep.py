"""The `sweep` flow: the pipeline for each of several settings as DVC experiments, then a table and a page that compare them."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from ans_core.config import resolve
from ans_core.report.metrics import headline
from flows.child import StageFailedError, run_once
from flows.paths import root
from flows.pipeline import end_with_worker, run_name, use_settings, words_of
from tasks.process import held
from tasks.stages import STAGES, SUMMARY
from tasks.tracker import started

Overrides = dict[str, Any]


@flow(name="sweep", flow_run_name=run_name, retries=0)
def sweep(
    grid: dict[str, list[Any]] | None = None, runs: list[Overrides] | None = None, profile: str | None = None, name: str | None = None
) -> str:
    """Run every combination of `grid`, as in {"rl.kl": [0.01, 0.05]}, and every one of `runs`, one after the other; return the file
    of the table, which names the page that `ans compare` would write of them.

    What several have in common runs once (DVC's run cache). `dvc exp show` lists the experiments; `dvc exp apply NAME-1` brings one back.
    params.yaml, dvc.lock and the results in runs/ are as before afterwards. Raises ValueError for nothing to run and ConfigError for an
    impossible setting, before anything runs.
    """
    end_with_worker()
    here = root()
    os.chdir(here)
    asked = [*combinations(grid or {}), *(runs or [])]
    if not asked:
        raise ValueError('nothing to run: give a grid, as {"rl.kl": [0.01, 0.05]}, or a list of runs, as [{"rl.kl": 0.01}]')
    name = name or f"sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    with held(here / ".ans/flow.lock", "sweep"):
        use_settings(profile, None, here)
        for overrides in asked:
            resolve(here / "params.yaml", words_of(overrides))
        kept = {file: file.read_bytes() for file in (here / "params.yaml", here / "dvc.lock") if file.exists()}
        results: list[tuple[str, Overrides, dict[str, float] | None]] = []
        try:
            with started() as tracked:
                for number, overrides in enumerate(asked, start=1):
                    experiment = f"{name}-{number}"
                    state = experiment_task(experiment)(experiment, overrides, here, lambda: tracked, return_state=True)
                    results.append((experiment, overrides, state.result(raise_on_failure=False) if state.is_completed() else None))
                    for file, content in kept.items():
                        file.write_bytes(content)
        finally:
            run_once(["-m", "dvc", "checkout", "--force", "--quiet"], root=here, timeout_s=3600, extra_environment={})
    path = here / ".ans/sweeps" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    page = table(results) + comparison([experiment for experiment, _, found in results if found is not None], path.with_suffix(""), here)
    path.write_text(page, encoding="utf-8")
    create_markdown_artifact(page, key="sweep", description=name)
    if failed := [experiment for experiment, _, found in results if found is None]:
        raise StageFailedError(f"{', '.join(failed)} failed; the others are in {path}")
    return str(path)


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[Overrides]:
    """Return every choice of one value a key; none for an empty grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []


def experiment_task(name: str):  # type: ignore[no-untyped-def]
    return task(name=name, cache_policy=NO_CACHE)(run_experiment)


def run_experiment(name: str, overrides: Overrides, here: Path, tracked: Callable[[], dict[str, str]]) -> dict[str, float]:
    """Run one experiment and return its headline metrics. `tracked`: what its stages find their tracker by."""
    words = [part for word in words_of(overrides) for part in ("-S", word)]
    limit_s = sum(stage.timeout_s for stage in STAGES)
    if status := run_once(["-m", "dvc", "exp", "run", "--name", name, *words], root=here, timeout_s=limit_s, extra_environment=tracked()):
        raise StageFailedError(f"experiment {name} failed (status {status}); its message is above")
    summary = json.loads((here / SUMMARY).read_text(encoding="utf-8"))
    return {f"{row}/{metric}": value for row, found in headline(summary).items() for metric, value in found.items()}


def comparison(experiments: Sequence[str], folder: Path, here: Path) -> str:
    """Write the page and return the line that names it; nothing for less than two experiments."""
    if len(experiments) < 2:
        return ""
    words = ["-m", "flows.cli", "compare", *experiments, "--out", str(folder)]
    if run_once(words, root=here, timeout_s=3600, extra_environment={}, say=lambda lines: None):
        return f"\nNo page compares them; `ans compare {' '.join(experiments)}` says why.\n"
    page = folder / "page.html"
    return f"\nSettings, differences with intervals, answers and curves: [{page}]({page.as_uri()})\n"


def table(results: Sequence[tuple[str, Overrides, dict[str, float] | None]]) -> str:
    """Return a page with a column for every experiment."""
    metrics = dict.fromkeys(metric for _, _, found in results for metric in found or {})
    keys = dict.fromkeys(key for _, overrides, _ in results for key in overrides)
    lines = ["# sweep", "", "| | " + " | ".join(name for name, _, _ in results) + " |", "|-" + "|-:" * len(results) + "|"]
    lines += [f"| {key} | " + " | ".join(str(overrides.get(key, "")) for _, overrides, _ in results) + " |" for key in keys]
    for metric in metrics:
        values = [None if found is None else found.get(metric) for _, _, found in results]
        lines.append(f"| {metric} | " + " | ".join("-" if value is None else f"{value:.4f}" for value in values) + " |")
    return "\n".join(lines) + "\n"
