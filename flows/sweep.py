"""The `sweep` flow: the pipeline for each of several settings as DVC experiments, then a table and a page
that compare them."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from ans_core.config import ConfigError, load, resolve
from ans_core.report.files import read_json
from ans_core.report.metrics import headline
from flows import kept
from flows.child import StageFailedError, run_once
from flows.compare import page_in_child
from flows.kept import settings_of_run, words_of
from flows.params import rewrite
from flows.pipeline import flow_at_work, run_name
from flows.results import experiment_refs, flat_metrics
from tasks.stages import HEADLINE, STAGES, SUMMARY
from tasks.surroundings import git
from tasks.tracker import started

Overrides = dict[str, Any]


@flow(name="sweep", flow_run_name=run_name, retries=0)
def sweep(
    grid: dict[str, list[Any]] | None = None,
    runs: list[Overrides] | None = None,
    profile: str | None = None,
    name: str | None = None,
) -> str:
    """Run every combination of `grid`, as in {"rl.kl": [0.01, 0.05]}, and every one of `runs`, one after the
    other; return the file of the table, which names the page that `ans compare` would write of them.

    What several have in common runs once (DVC's run cache). `dvc exp show` lists the experiments; `dvc exp
    apply NAME-1` brings one back. params.yaml, dvc.lock and the results in runs/ are as before afterwards,
    also after an interrupt; after kill -9 the next flow brings them back. With the `name` of an earlier
    sweep, members that it finished are not run again. Raises ValueError for nothing to run or for members of
    that name with other settings, and ConfigError for an impossible setting or without git, before anything runs.
    """
    requests = [*combinations(grid or {}), *(runs or [])]
    if not requests:
        raise ValueError(
            'nothing to run: give a grid, as {"rl.kl": [0.01, 0.05]}, or a list of runs, as [{"rl.kl": 0.01}]'
        )
    name = name or f"sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    with flow_at_work("sweep") as here, settings_of_run(here, profile=profile):
        if not git(here, "rev-parse", "HEAD"):
            raise ConfigError(
                f"{here} has no git commit, on which DVC keeps experiments: sweep in a clone of a repository"
            )
        members = {
            f"{name}-{n}": resolve(here / "params.yaml", words_of(overrides))
            for n, overrides in enumerate(requests, start=1)
        }
        done = {
            experiment: metrics
            for experiment, settings in members.items()
            if (metrics := finished(experiment, settings, here))
        }
        print(
            f"sweep {name}: {len(members) - len(done)} of {len(members)} to run; after a stop, --name "
            f"{name} goes on with it",
            flush=True,
        )
        figures = run_others(members, done, here)
    path = here / ".ans/sweeps" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = [
        (member, overrides, figures[member]) for member, overrides in zip(members, requests, strict=True)
    ]
    succeeded = [experiment for experiment in members if figures[experiment] is not None]
    page = table(results) + comparison(succeeded, path.with_suffix(""), here)
    path.write_text(page, encoding="utf-8")
    create_markdown_artifact(page, key="sweep", description=name)
    if failed := [experiment for experiment in members if experiment not in succeeded]:
        raise StageFailedError(
            f"{', '.join(failed)} failed, its message is above; --name {name} goes on, the others are in "
            f"{path}"
        )
    return str(path)


def run_others(members: Mapping[str, dict[str, Any]], done: Mapping[str, Any], here: Path) -> dict[str, Any]:
    """Run the members (name -> settings) that are not done; return all figures, None for one that failed."""
    figures = dict(done)
    kept.keep(here)
    try:
        with started() as tracked:
            for experiment, settings in members.items():
                if experiment in done:
                    continue
                kept.note_member(here, settings)
                state = run_experiment.with_options(name=experiment)(
                    experiment, settings, here, lambda: tracked, return_state=True
                )
                figures[experiment] = state.result() if state.is_completed() else None
                kept.put_back(here)
    finally:
        kept.end(here)
    return figures


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[Overrides]:
    """Return every choice of one value a key; none for an empty grid."""
    return (
        [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    )


@task(cache_policy=NO_CACHE)
def run_experiment(
    name: str, settings: dict[str, Any], here: Path, tracked: Callable[[], dict[str, str]]
) -> dict[str, float]:
    """Write params.yaml, run one experiment and return its headline metrics. `tracked`: what its stages find their
    tracker by."""
    rewrite(here, settings)  # not by `dvc exp run -S`, which reads values in Hydra's own syntax
    limit_s = sum(stage.timeout_s for stage in STAGES)
    if status := run_once(
        ["-m", "dvc", "exp", "run", "--name", name],
        root=here,
        timeout_s=limit_s,
        extra_environment=tracked(),
    ):
        raise StageFailedError(f"experiment {name} failed (status {status}); its message is above")
    return flat_metrics(headline(read_json(here / SUMMARY)))


def finished(name: str, settings: dict[str, Any], here: Path) -> dict[str, float]:
    """Return the headline metrics of an experiment that is there; nothing if it is not. Raises ValueError if
    it has other settings."""
    matching = experiment_refs(name, here)
    if not matching:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "params.yaml")
        path.write_text(git(here, "show", f"{matching[0]}:params.yaml") + "\n", encoding="utf-8")
        if load(path).model_dump(mode="json") != settings:
            raise ValueError(
                f"there is an experiment {name} with other settings: give another --name, or `dvc exp "
                f"remove {name}`"
            )
    return flat_metrics(json.loads(git(here, "show", f"{matching[0]}:{HEADLINE}")))


def comparison(experiments: Sequence[str], folder: Path, here: Path) -> str:
    """Write the page and return the line that names it; nothing for less than two experiments."""
    if len(experiments) < 2:
        return ""
    if (page := page_in_child(experiments, folder, here)) is None:
        return f"\nNo page compares them; `ans compare {' '.join(experiments)}` says why.\n"
    return f"\nSettings, differences with intervals, answers and curves: [{page}]({page.as_uri()})\n"


def table(results: Sequence[tuple[str, Overrides, dict[str, float] | None]]) -> str:
    """Return a page with a column for every experiment."""
    metrics = dict.fromkeys(metric for _, _, figures in results for metric in figures or {})
    keys = dict.fromkeys(key for _, overrides, _ in results for key in overrides)
    lines = [
        "# sweep",
        "",
        "| | " + " | ".join(name for name, _, _ in results) + " |",
        "|-" + "|-:" * len(results) + "|",
    ]
    lines += [
        f"| {key} | " + " | ".join(str(overrides.get(key, "")) for _, overrides, _ in results) + " |"
        for key in keys
    ]
    for metric in metrics:
        values = [None if figures is None else figures.get(metric) for _, _, figures in results]
        lines.append(
            f"| {metric} | " + " | ".join("-" if value is None else f"{value:.4f}" for value in values) + " |"
        )
    return "\n".join(lines) + "\n"


def plain_text(path: Path) -> str:
    """Return a sweep's page for a terminal: aligned columns, headed by what their experiments' names add to
    the sweep's."""
    *lines, last = path.read_text(encoding="utf-8").strip().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (*lines, last)
        if line.startswith("| ")
    ]
    names = [name.removeprefix(path.stem) for name in cells[0][1:]]
    rows = [[path.stem, *names], *cells[1:]]
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [
        f"{name:<{first}}"
        + "".join(f"  {value:>{width}}" for value, width in zip(values, widths, strict=True))
        for name, *values in rows
    ]
    return "\n".join(text + ([] if last.startswith("|") else ["", re.sub(r"\[(.*)\]\(.*\)", r"\1", last)]))
