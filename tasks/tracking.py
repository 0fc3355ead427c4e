"""Record what a stage logs as MLflow runs: one parent per pipeline run, one nested run per stage, also under a bare `dvc repro`."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from importlib import import_module
from multiprocessing.managers import BaseManager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import psutil

from tasks.process import die_with_parent

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("DO_NOT_TRACK", "true")
# MLflow's defaults (7 retries of 120 s) block a stage for minutes while its server is away.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

EXPERIMENT = "ans"
FLUSH_EVERY_S = 5
RETRY_FLUSH_S = 60
"""Seconds until the next try after the store refused metrics; they are kept until then."""
ARTIFACT_SUFFIXES = {".html", ".json", ".csv", ".png", ".jpg", ".gif", ".md"}
MAX_ARTIFACT_BYTES = 20_000_000
MAX_ARTIFACTS = 60


_IMPORT = Thread(target=import_module, args=("mlflow.store.tracking.sqlalchemy_store",), daemon=True)
"""Only the tracker's process starts it."""


class TrackingError(ValueError):
    """The store of runs can't be used; raised before any work is spent."""


@functools.cache
def check_database(path: Path) -> None:
    """Raise TrackingError for a damaged file, which MLflow would answer with a page of SQL."""
    if path.exists() and path.stat().st_size:
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
                (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.OperationalError:  # locked by a writer: the database is in use, so it is fine
            return
        except sqlite3.DatabaseError as error:
            found = str(error)
        if found != "ok":
            raise TrackingError(
                f"the history of runs {path} is damaged ({found.splitlines()[-1]}): move it away and a new one is begun; "
                "results and caches don't depend on it"
            )


def client(root: Path) -> MlflowClient:
    """Return the client of the store that MLFLOW_TRACKING_URI names, else of this checkout's .ans/mlflow.db."""
    import logging

    logging.getLogger("alembic").setLevel(logging.WARNING)
    if _IMPORT.is_alive():
        _IMPORT.join()  # a second thread importing it meanwhile would see a half-initialised module
    from mlflow import MlflowClient

    (root / ".ans").mkdir(exist_ok=True)
    if not (uri := os.environ.get("MLFLOW_TRACKING_URI")):
        database = root.resolve() / ".ans/mlflow.db"
        check_database(database)
        uri = f"sqlite:///{database}"
    return MlflowClient(uri)


def experiment_id(mlflow: MlflowClient, root: Path) -> str:
    """Return the experiment's id. Raises TrackingError if the store does not answer."""
    from mlflow.exceptions import MlflowException

    try:
        found = mlflow.get_experiment_by_name(EXPERIMENT)
    except MlflowException as error:
        where = os.environ.get("MLFLOW_TRACKING_URI", ".ans/mlflow.db")
        why = str(error).splitlines()[0][:200]
        raise TrackingError(f"MLflow at {where} does not answer ({why}): start it, or unset MLFLOW_TRACKING_URI") from None
    if found is not None:
        return found.experiment_id
    local = "MLFLOW_TRACKING_URI" not in os.environ
    return mlflow.create_experiment(EXPERIMENT, artifact_location=(root.resolve() / ".ans/mlartifacts").as_uri() if local else None)


def pipeline_key(pid: int) -> str:
    """Return what the stages of one pipeline run share: the flow run's id, or the `dvc` process that started the stage's process `pid`."""
    if key := os.environ.get("ANS_PIPELINE"):
        return key
    stage = psutil.Process(pid)
    started_by = [p for p in stage.parents() if any(Path(word).name == "dvc" for word in p.cmdline()[:4])]
    top = started_by[-1] if started_by else stage
    return f"dvc-{top.pid}-{int(top.create_time())}"


def git_tags(root: Path) -> dict[str, str]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "git.sha": git("rev-parse", "HEAD"),
        "git.dirty": str(bool(git("status", "--porcelain", "--untracked-files=no"))).lower(),
    }


def where_from(root: Path) -> dict[str, str]:
    return {"ans.host": socket.gethostname(), **git_tags(root)}


def metric_name(name: str) -> str:
    """Replace `&`, which MLflow does not allow: video/val/J&F is logged as video/val/J_F."""
    return re.sub(r"[^\w\-./ :]", "_", name)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: str(value)[:500]}
    return found


def find_runs(mlflow: MlflowClient, experiment: str, tags: dict[str, str], limit: int = 1) -> list[Any]:
    """Return runs, newest first."""
    where = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    return list(mlflow.search_runs([experiment], where, max_results=limit, order_by=["attributes.start_time DESC"]))


def parent_run(mlflow: MlflowClient, experiment: str, key: str, profile: str, root: Path, *, pid: int) -> str:
    """Return the pipeline's run; the first stage makes it, and a later one reopens it if it was closed. `pid` works on it."""
    found = find_runs(mlflow, experiment, {"ans.pipeline": key, "ans.kind": "pipeline"})
    if found:
        mlflow.set_tag(found[0].info.run_id, "ans.pid", str(pid))
        mlflow.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)
    tags = {"ans.pipeline": key, "ans.kind": "pipeline", "ans.profile": profile, "ans.pid": str(pid), **where_from(root)}
    name = f"{profile} {time.strftime('%Y-%m-%d %H:%M')}"
    return str(mlflow.create_run(experiment, tags=tags, run_name=name).info.run_id)


class StageRun:
    """The nested run of one stage. Metrics are buffered: one call to the store costs 50 ms, one metric in a batch 0.3 ms."""

    def __init__(self, root: Path, *, stage: str, version: str, profile: str, state_key: str, params: dict[str, Any], pid: int) -> None:
        self._mlflow = client(root)
        from mlflow.entities import Param

        experiment = experiment_id(self._mlflow, root)
        if flow_pid := os.environ.get("ANS_PIPELINE_PID"):
            self._parent = parent_run(self._mlflow, experiment, pipeline_key(pid), profile, root, pid=int(flow_pid))
        else:  # bare `dvc repro`: this stage owns the parent run, not a flow
            close_stuck_runs(root)
            self._parent = parent_run(self._mlflow, experiment, pipeline_key(pid), profile, root, pid=pid)
        tags = {"mlflow.parentRunId": self._parent, "ans.kind": "stage", "ans.stage": stage, "ans.version": version}
        tags |= {"ans.profile": profile, "ans.key": state_key, "ans.pid": str(pid), **where_from(root)}
        self.run_id = str(self._mlflow.create_run(experiment, tags=tags, run_name=f"{stage} ({profile})").info.run_id)
        self._mlflow.log_batch(self.run_id, params=[Param(key, value) for key, value in flat(params).items()])
        self._waiting: list[Metric] = []
        self._next_flush_s = time.monotonic() + FLUSH_EVERY_S

    def log(self, metrics: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._waiting += [Metric(metric_name(key), float(value), now_ms, step) for key, value in metrics.items()]
        if time.monotonic() > self._next_flush_s:
            self.flush()

    def flush(self) -> None:
        """Send buffered metrics; if the store refuses them they wait for the next flush."""
        from mlflow.exceptions import MlflowException

        wait_s = FLUSH_EVERY_S
        try:
            while self._waiting:
                self._mlflow.log_batch(self.run_id, metrics=self._waiting[:1000])
                del self._waiting[:1000]
        except MlflowException as error:
            warn(f"MLflow takes no metrics at present, {len(self._waiting)} wait: {error}")
            wait_s = RETRY_FLUSH_S
        self._next_flush_s = time.monotonic() + wait_s

    def log_files(self, folder: Path) -> None:
        """Log the small files of an output that a person would look at; weights stay in DVC."""
        from mlflow.exceptions import MlflowException

        try:
            self._log_files(folder)
        except (MlflowException, OSError) as error:
            warn(f"MLflow did not take the files of {folder}, which stay there: {error}")

    def _log_files(self, folder: Path) -> None:
        found = [
            path for path in sorted(folder.rglob("*")) if path.suffix in ARTIFACT_SUFFIXES and len(path.relative_to(folder).parts) <= 2
        ]
        small = [path for path in found if path.stat().st_size <= MAX_ARTIFACT_BYTES and not path.name.startswith("tokenizer")]
        for path in small[:MAX_ARTIFACTS]:
            self._mlflow.log_artifact(self.run_id, str(path), str(path.parent.relative_to(folder)) if path.parent != folder else None)

    def end(self, *, ok: bool) -> None:
        from mlflow.exceptions import MlflowException

        self.flush()
        try:
            self._mlflow.set_terminated(self.run_id, "FINISHED" if ok else "FAILED")
            if "ANS_PIPELINE" not in os.environ or not ok:  # a flow closes its own run; under a bare `dvc repro` this stage must
                self._mlflow.set_terminated(self._parent, "FINISHED" if ok else "FAILED")
        except MlflowException as error:
            warn(f"MLflow does not answer, {len(self._waiting)} metrics are lost; the next run closes this one: {error}")


def warn(message: str) -> None:
    print(message.splitlines()[0], file=sys.stderr, flush=True)


class TrackedRun:
    """A StageRun as the stage uses it: if the tracker's process was killed, training goes on and its curves are lost."""

    def __init__(self, remote: StageRun) -> None:
        self._remote: StageRun | None = remote

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._ask("log", metrics, step)

    def log_files(self, folder: Path) -> None:
        self._ask("log_files", folder)

    def end(self, *, ok: bool) -> None:
        self._ask("end", ok=ok)

    def _ask(self, method: str, *values: Any, **named: Any) -> None:
        if self._remote is None:
            return
        try:
            getattr(self._remote, method)(*values, **named)
        except (OSError, EOFError):
            warn("the process that logs to MLflow was killed: the stage goes on without it, later curves are lost")
            self._remote = None


class Tracker(BaseManager):
    """Runs StageRuns in its own process, which imports MLflow (3 s) while the stage's process imports torch and everything else."""

    def stage_run(self, root: Path, **values: Any) -> TrackedRun:
        """Start a stage's run. Raises TrackingError if the store can't be used."""
        return TrackedRun(self.StageRun(root, pid=os.getpid(), **values))  # type: ignore[attr-defined]


def start_tracker() -> Tracker:
    """Start the tracker; used as a context manager, it ends with the block."""
    tracker = Tracker()
    tracker.start(_prepare, (os.getpid(),))
    return tracker


def _prepare(stage_pid: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the whole group gets it, and the stage has yet to close its run
    die_with_parent(signal.SIGKILL, parent=stage_pid)
    _IMPORT.start()


Tracker.register("StageRun", StageRun, exposed=("log", "log_files", "end"))


def last_run(root: Path, tags: dict[str, str]) -> Any | None:
    """Return the newest finished stage run with these tags, or None."""
    mlflow = client(root)
    found = find_runs(mlflow, experiment_id(mlflow, root), {"ans.kind": "stage", **tags}, limit=20)
    return next((run for run in found if run.info.status == "FINISHED"), None)


def durations_s(root: Path, profile: str) -> dict[str, float]:
    """Return, for each stage that has finished on this profile, how long it took the last time."""
    mlflow = client(root)
    found = find_runs(mlflow, experiment_id(mlflow, root), {"ans.kind": "stage", "ans.profile": profile}, limit=200)
    took = {run.data.tags["ans.stage"]: run.data.metrics.get("duration_s") for run in reversed(found) if run.info.status == "FINISHED"}
    return {stage: seconds for stage, seconds in took.items() if seconds is not None}


def works_since(pid: int, started_s: float) -> bool:
    """Tell whether this process is at work and already was at `started_s`; a killed one that nobody has waited for (a zombie) is not."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < started_s + 1
    except psutil.NoSuchProcess:
        return False


def close_stuck_runs(root: Path, *, repair: bool = True) -> list[str]:
    """Return names of this host's runs still marked RUNNING whose process is gone; with `repair` end them as FAILED."""
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
