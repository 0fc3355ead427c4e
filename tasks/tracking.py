"""Runs in MLflow, in the store of this checkout or the one that MLFLOW_TRACKING_URI names: one parent per
pipeline run, one nested run per stage, also under a bare `dvc repro`. tasks/tracker.py fills them."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import socket
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ans_core.config import PROFILES, ConfigError, resolve
from tasks.stages import ROWS, stage_named
from tasks.surroundings import surroundings

if TYPE_CHECKING:
    from mlflow import MlflowClient

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("DO_NOT_TRACK", "true")
# MLflow's defaults (7 retries of 120 s) block a stage for minutes while its server is away.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

EXPERIMENT = "ans"
KIND = "mlflow.experimentKind"
TRAINING = "custom_model_development"
"""The kind whose pages show runs and curves first; without it MLflow opens on the pages for prompts and
traces."""
MAX_SHOWN = 12
"""Characters of a setting's value in a run's name."""
MAX_PARAMS = 100
"""Of one request to the store."""


class TrackingError(ValueError):
    """The store of runs can't be used."""


def store_faults() -> tuple[type[Exception], ...]:
    """Return what the client raises when its store is away or damaged."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, TrackingError, OSError


@functools.cache
def check_database(path: Path) -> None:
    """Raise TrackingError for a damaged file, which MLflow would answer with a page of SQL."""
    if path.exists() and path.stat().st_size:
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
                (status,) = database.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.OperationalError:  # locked by a writer: the database is in use, so it is fine
            return
        except sqlite3.DatabaseError as error:
            status = str(error)
        if status != "ok":
            raise TrackingError(
                f"the history of runs {path} is damaged ({status.splitlines()[-1]}): move it away and a new "
                "one is begun; "
                "results and caches don't depend on it"
            )


def client(root: Path) -> MlflowClient:
    """Return the client of the store that MLFLOW_TRACKING_URI names, else of this checkout's .ans/mlflow.db.
    Raises TrackingError for one that this MLflow can't open."""
    import logging

    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    (root / ".ans").mkdir(exist_ok=True)
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return MlflowClient(uri)
    database = root.resolve() / ".ans/mlflow.db"
    check_database(database)
    try:
        # two processes that open a new store would both make its tables, and one would fail
        with (root / ".ans/mlflow.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return MlflowClient(f"sqlite:///{database}")
    except MlflowException as error:
        why = str(error).partition(". ")[0]
        remedy = (
            "move it away and a new one is begun, or copy it and try `mlflow db upgrade "
            f"sqlite:///{database}`"
        )
        raise TrackingError(f"MLflow can't open the history of runs {database} ({why}): {remedy}") from None


def without_password(text: str) -> str:
    """Take user and password out of the addresses in a text."""
    return re.sub(r"(?<=://)[^/\s]+@", "", text)


def experiment_id(mlflow: MlflowClient, root: Path) -> str:
    """Return the experiment's id; the first call makes it. Raises TrackingError if the store does not
    answer."""
    from mlflow.exceptions import MlflowException

    try:
        experiment = mlflow.get_experiment_by_name(EXPERIMENT)
    except MlflowException as error:
        where = without_password(os.environ.get("MLFLOW_TRACKING_URI", ".ans/mlflow.db"))
        why = without_password(str(error).splitlines()[0])[:200]
        raise TrackingError(
            f"MLflow at {where} does not answer ({why}): start it, or unset MLFLOW_TRACKING_URI"
        ) from None
    if experiment is None:
        place = (
            None if "MLFLOW_TRACKING_URI" in os.environ else (root.resolve() / ".ans/mlartifacts").as_uri()
        )
        try:
            return mlflow.create_experiment(EXPERIMENT, artifact_location=place, tags={KIND: TRAINING})
        except MlflowException:
            experiment = mlflow.get_experiment_by_name(EXPERIMENT)  # another process has made it
            if experiment is None:
                raise
    if KIND not in experiment.tags:
        mlflow.set_experiment_tag(experiment.experiment_id, KIND, TRAINING)
    return experiment.experiment_id


def pipeline_key(pid: int) -> str:
    """Return what the stages of one pipeline run share: the flow run's id, or the `dvc` process that started
    the stage's process `pid`."""
    if key := os.environ.get("ANS_PIPELINE"):
        return key
    stage = psutil.Process(pid)
    started_by = [p for p in stage.parents() if any(Path(word).name == "dvc" for word in p.cmdline()[:4])]
    top = started_by[-1] if started_by else stage
    return f"dvc-{top.pid}-{int(top.create_time())}"


def where_from(root: Path) -> dict[str, str]:
    """Return tags of the code, the data and the machine that a run is made with."""
    return {"ans.host": socket.gethostname(), **surroundings(root)}


def metric_name(name: str) -> str:
    """Replace `&`, which MLflow does not allow in names of metrics and parameters: video/val/J&F is logged as
    video/val/J_F."""
    return re.sub(r"[^\w\-./ :]", "_", name)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flattened: dict[str, str] = {}
    for key, value in values.items():
        flattened |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: str(value)[:500]}
        )
    return flattened


def find_runs(
    mlflow: MlflowClient, experiment: str, tags: dict[str, str], limit: int = 1, *, finished: bool = False
) -> list[Any]:
    """Return runs, newest first."""
    wanted = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
    wanted += ["attributes.status = 'FINISHED'"] if finished else []
    order = ["attributes.start_time DESC"]
    return list(mlflow.search_runs([experiment], " and ".join(wanted), max_results=limit, order_by=order))


def parent_run(
    mlflow: MlflowClient,
    experiment: str,
    key: str,
    profile: str,
    root: Path,
    *,
    pid: int,
    settings: Mapping[str, str],
    start_ms: int,
) -> str:
    """Return the pipeline's run; whoever needs it first makes it. `pid` works on it, `settings` are its
    parameters."""
    runs = find_runs(mlflow, experiment, {"ans.pipeline": key, "ans.kind": "pipeline"})
    if runs:
        if not runs[0].data.params:  # the store went away just then
            log_params(mlflow, runs[0].info.run_id, settings)
        return str(runs[0].info.run_id)
    tags = {
        "ans.pipeline": key,
        "ans.kind": "pipeline",
        "ans.profile": profile,
        "ans.pid": str(pid),
        **where_from(root),
    }
    tags["mlflow.source.name"] = "flows/pipeline.py" if key.startswith("flow-") else "dvc.yaml"
    name = run_name(profile, settings, root, start_ms)
    run = str(mlflow.create_run(experiment, start_time=start_ms, tags=tags, run_name=name).info.run_id)
    log_params(mlflow, run, settings)
    return run


def run_name(profile: str, settings: Mapping[str, str], root: Path, start_ms: int) -> str:
    """Name a run by what tells it from others in a chart's legend: the profile, settings that are not the
    profile's, and the time."""
    path, plain = root / PROFILES / f"{profile}.yaml", settings
    if path.exists():
        with suppress(ConfigError):  # the file was edited since
            plain = flat(resolve(path))
    changed = [
        (key, value)
        for key, value in settings.items()
        if plain.get(key) != value and not key.startswith("launch.")
    ]
    shown = [f"{key}={value}" if len(value) <= MAX_SHOWN else key for key, value in changed[:2]]
    more = [f"+{len(changed) - 2}"] if len(changed) > 2 else []
    return " ".join([profile, *shown, *more, clock(start_ms)])


def clock(time_ms: int) -> str:
    """Return the local time, without the year, which MLflow shows beside the name."""
    return time.strftime("%m-%d %H:%M", time.localtime(time_ms / 1000))


def log_params(mlflow: MlflowClient, run: str, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    entries = [Param(metric_name(key), value) for key, value in params.items()]
    for start in range(0, len(entries), MAX_PARAMS):
        mlflow.log_batch(run, params=entries[start : start + MAX_PARAMS])


def log_metrics(mlflow: MlflowClient, run: str, metrics: Mapping[str, float]) -> None:
    """Log values that have no step."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    mlflow.log_batch(
        run, metrics=[Metric(metric_name(key), float(value), now_ms, 0) for key, value in metrics.items()]
    )


def log_finished(
    root: Path, name: str, *, tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float]
) -> None:
    """Log a run that is over."""
    mlflow = client(root)
    run = mlflow.create_run(experiment_id(mlflow, root), tags=dict(tags), run_name=name).info.run_id
    log_params(mlflow, run, params)
    log_metrics(mlflow, run, metrics)
    mlflow.set_terminated(run)


def pipeline_metrics(stage: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what the pipeline's run shows of a stage's metrics: `rl/referring/val/gIoU` of evaluate@rl and
    the report, and `train/sft/loss` (the mean over the last steps). Its curves, counts of samples and the
    machine's load stay with the stage's own run; `describe` shows how long it took."""
    task, _, row = stage.partition("@")
    place = stage.replace("@", "/")
    shown = {}
    for name, value in metrics.items():
        part, _, rest = name.partition("/")
        if task == "evaluate" and part == "eval":
            shown[f"{row}/{rest}"] = value
        elif task == "report" and part in ROWS:
            shown[name] = value
        elif part == "train":
            shown[f"train/{place}/{rest}"] = value
        elif (
            rest
            and part not in {"system", "samples", "precision"}
            and task not in {"evaluate", "report"}
            and not stage_named(stage).curves
        ):
            shown[f"{place}/{name}"] = value
    return shown


def pipeline_data(stage: str, inputs: Sequence[Any]) -> list[Any]:
    """Return which of a stage's inputs the pipeline's run shows as its data sets: those that `prepare` reads,
    and what it makes of them."""
    return [one for one in inputs if stage == "prepare" or one.dataset.name == "data"]


def link_cached(mlflow: MlflowClient, experiment: str, parent: str, stage: str, state_key: str) -> Any | None:
    """Name in the pipeline's run which run made a cached stage's output, and show that run's metrics and
    data. Return that run, None if it is unknown."""
    tags = {"ans.kind": "stage", "ans.stage": stage, "ans.key": state_key}
    made = next(iter(find_runs(mlflow, experiment, tags, finished=True)), None)
    if made is not None:
        mlflow.set_tag(parent, f"cached.{stage.replace('@', '/')}", made.info.run_id)
        log_metrics(mlflow, parent, pipeline_metrics(stage, made.data.metrics))
        mlflow.log_inputs(parent, pipeline_data(stage, made.inputs.dataset_inputs))
    return made


def describe(mlflow: MlflowClient, experiment: str, parent: str) -> None:
    """Write the pipeline's stages, with links to the runs that made them, as the description of its run
    (MLflow's page shows no tables), and how long they took as metrics: `wall_s/sft`. These come after the
    first result, since MLflow's page compares what was logged first."""
    lines, took, shown = [], {}, mlflow.get_run(parent).data
    rows = [
        (run, "ran")
        for run in reversed(find_runs(mlflow, experiment, {"mlflow.parentRunId": parent}, limit=100))
    ]
    rows += [
        (mlflow.get_run(run), "cached") for name, run in shown.tags.items() if name.startswith("cached.")
    ]
    for run, how in rows:
        how = how if run.info.status == "FINISHED" else run.info.status.lower()
        link = f"[{run.data.tags['ans.stage']}](#/experiments/{experiment}/runs/{run.info.run_id})"
        lines.append(f"- {link}: {how}, {run.data.metrics.get('duration_s', 0):.0f} s")
        if "duration_s" in run.data.metrics:
            took[f"wall_s/{run.data.tags['ans.stage'].replace('@', '/')}"] = run.data.metrics["duration_s"]
    new = {key: value for key, value in took.items() if shown.metrics.get(key) != value}
    if new and shown.metrics:
        log_metrics(mlflow, parent, new)
    mlflow.set_tag(parent, "mlflow.note.content", "\n".join(lines))


def warn(message: str) -> None:
    print(without_password(message.splitlines()[0]), file=sys.stderr, flush=True)


def last_run(root: Path, tags: dict[str, str]) -> Any | None:
    """Return the newest finished stage run with these tags, or None."""
    mlflow = client(root)
    runs = find_runs(mlflow, experiment_id(mlflow, root), {"ans.kind": "stage", **tags}, finished=True)
    return next(iter(runs), None)


def durations_s(root: Path, profile: str) -> dict[str, float]:
    """Return, for each stage that has finished on this profile, how long it took the last time."""
    mlflow = client(root)
    tags = {"ans.kind": "stage", "ans.profile": profile}
    runs = find_runs(mlflow, experiment_id(mlflow, root), tags, limit=200, finished=True)
    return {
        run.data.tags["ans.stage"]: run.data.metrics["duration_s"]
        for run in reversed(runs)
        if "duration_s" in run.data.metrics
    }


def works_since(pid: int, started_s: float) -> bool:
    """Tell whether this process is at work and already was at `started_s`; a killed one that nobody has
    waited for (a zombie) is not."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < started_s + 1
    except psutil.NoSuchProcess:
        return False


def close_stuck_runs(root: Path, *, repair: bool = True) -> list[str]:
    """Return names of this host's runs still marked RUNNING whose process is gone; with `repair` end them as
    FAILED."""
    mlflow = client(root)
    closed = []
    for run in mlflow.search_runs([experiment_id(mlflow, root)], "attributes.status = 'RUNNING'"):
        pid, host = run.data.tags.get("ans.pid"), run.data.tags.get("ans.host")
        if host not in {None, socket.gethostname()}:
            continue  # a shared store: only that host knows
        if not (pid and works_since(int(pid), run.info.start_time / 1000)):
            if repair:
                mlflow.set_terminated(run.info.run_id, "FAILED")
            closed.append(run.info.run_name)
    return closed
