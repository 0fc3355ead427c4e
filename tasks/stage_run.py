"""What a stage logs in, its nested run in MLflow out, in the process of tasks/tracker.py: the stage never
waits for the store, and loses nothing while it is away."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from ans_core.written import write_atomically
from tasks import tracking
from tasks.process import imports_without_collector, write_error
from tasks.tracking import metric_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

SEND_EVERY_S = 5.0
RETRY_S = 30.0
"""Seconds until the next try after the store did not answer."""
SAMPLE_EVERY_S = 15.0
"""Seconds between two looks at the machine's load."""
MAX_METRICS = 1000
"""Of one request to the store. One call costs 50 ms, one metric in it 0.3 ms."""
ARTIFACT_SUFFIXES = {".html", ".json", ".jsonl", ".csv", ".png", ".jpg", ".webp", ".gif", ".md"}
MAX_ARTIFACT_BYTES = 20_000_000
MAX_ARTIFACTS = 60
UNSENT = ".ans/unsent"


def import_store() -> None:
    """Import MLflow before it is needed (2 s)."""
    with imports_without_collector():
        import_module("mlflow.store.tracking.sqlalchemy_store")


IMPORT = Thread(target=import_store, daemon=True)
"""Only the tracker starts it, while the stage imports torch and everything else."""


@dataclass(kw_only=True)
class Record:
    """A stage's run, and what of it the store does not have yet."""

    stage: str
    profile: str
    pipeline: str
    in_flow: bool
    """A flow closes the pipeline's run itself; under a bare `dvc repro` the stage must."""
    owner: int
    """The process that works on the pipeline's run."""
    tags: dict[str, str]
    params: dict[str, str]
    settings: dict[str, str]
    """Of the whole pipeline: the parameters of its run."""
    data: dict[str, str]
    """Hashes of what the stage reads, by name."""
    start_ms: int
    run_id: str | None = None
    parent: str | None = None
    metrics: list[tuple[str, float, int, int]] = field(default_factory=list)
    """(name, value, time in ms, step)"""
    result: dict[str, float] = field(default_factory=dict)
    files: str | None = None
    status: str | None = None
    end_ms: int | None = None

    @property
    def sent(self) -> bool:
        return self.status is None and self.end_ms is not None


def send(record: Record, mlflow: MlflowClient, experiment: str, root: Path) -> None:
    """Send what the store does not have, and take it out of the record. Raises one of `store_faults` where
    the store does not take it."""
    if record.run_id is None:
        open_run(record, mlflow, experiment, root)
    assert record.run_id is not None and record.parent is not None  # noqa: PT018
    from mlflow.entities import Metric

    if record.params:
        tracking.log_params(mlflow, record.run_id, record.params)
        record.params = {}
    if record.data:
        inputs = list(data_sets(record))
        mlflow.log_inputs(record.run_id, inputs)
        mlflow.log_inputs(record.parent, tracking.pipeline_data(record.stage, inputs))
        record.data = {}
    while record.metrics:
        batch = record.metrics[:MAX_METRICS]
        mlflow.log_batch(record.run_id, metrics=[Metric(*values) for values in batch])
        del record.metrics[: len(batch)]
    if record.result:
        tracking.log_metrics(mlflow, record.parent, tracking.pipeline_metrics(record.stage, record.result))
        record.result = {}
    if record.files is not None:
        log_files(mlflow, record.run_id, Path(record.files))
        record.files = None
    if record.status is not None:
        mlflow.set_terminated(record.run_id, record.status, end_time=record.end_ms)
        tracking.describe(mlflow, experiment, record.parent)
        if not record.in_flow or record.status == "FAILED":
            mlflow.set_terminated(record.parent, record.status, end_time=record.end_ms)
        record.status = None


def open_run(record: Record, mlflow: MlflowClient, experiment: str, root: Path) -> None:
    if not record.in_flow:
        tracking.close_stuck_runs(root)
    record.parent = tracking.parent_run(
        mlflow,
        experiment,
        record.pipeline,
        record.profile,
        root,
        pid=record.owner,
        settings=record.settings,
        start_ms=record.start_ms,
    )
    mlflow.set_tag(record.parent, "ans.pid", str(record.owner))
    mlflow.update_run(record.parent, status="RUNNING")  # an earlier stage may have closed it
    tags = {**record.tags, "mlflow.parentRunId": record.parent}
    name = f"{record.stage} {tracking.run_name(record.profile, record.settings, root, record.start_ms)}"
    record.run_id = str(
        mlflow.create_run(experiment, start_time=record.start_ms, tags=tags, run_name=name).info.run_id
    )


def data_sets(record: Record) -> Iterator[Any]:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    context = InputTag(
        "mlflow.data.context", "evaluation" if record.stage.startswith("evaluate") else "training"
    )
    for name, digest in record.data.items():
        source = json.dumps({"uri": f"dvc:{name}", "md5": digest})
        yield DatasetInput(
            Dataset(name=name, digest=digest[:36], source_type="dvc", source=source), [context]
        )


def log_files(mlflow: MlflowClient, run_id: str, folder: Path) -> None:
    """Log the small files of an output that a person would look at; weights stay in DVC."""
    # metrics and predictions before pictures
    inside = sorted(folder.rglob("*"), key=lambda path: (len(path.parts), path))
    files = [
        path
        for path in inside
        if path.suffix in ARTIFACT_SUFFIXES and len(path.relative_to(folder).parts) <= 2
    ]
    small = [
        path
        for path in files
        if path.stat().st_size <= MAX_ARTIFACT_BYTES and not path.name.startswith("tokenizer")
    ]
    for path in small[:MAX_ARTIFACTS]:
        mlflow.log_artifact(
            run_id, str(path), str(path.parent.relative_to(folder)) if path.parent != folder else None
        )


class Load:
    """The load of this machine: processor, memory, disk, network and NVIDIA's GPUs."""

    def __init__(self) -> None:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        with suppress(RuntimeError):  # no GPU
            self._monitors.append(GPUMonitor())

    def sample(self) -> dict[str, float]:
        load: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            load |= {f"system/{name}": value for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        return load


class StageRun:
    """The nested run of one stage, as the tracker's process holds it. A thread sends what `log` collects.
    Methods return what the stage is to tell its user, or None."""

    def __init__(
        self, root: Path, *, stage: str, version: str, profile: str, state_key: str, params: dict[str, Any],
        settings: dict[str, Any], data: dict[str, str], pid: int, pipeline: dict[str, str],
    ) -> None:  # fmt: skip
        """pid: of the stage's process. pipeline: what its flow has left in its environment."""
        self.pid, self._root = pid, root
        self.finished = False
        """Whether everything is sent or kept."""
        flow_pid = pipeline.get("ANS_PIPELINE_PID")
        tags = {
            "ans.kind": "stage",
            "ans.stage": stage,
            "ans.version": version,
            "ans.profile": profile,
            "ans.key": state_key,
        }
        tags |= {
            "ans.pid": str(pid),
            **tracking.where_from(root),
            "mlflow.source.name": f"tasks/{stage.partition('@')[0]}.py",
        }
        self.record = Record(
            stage=stage, profile=profile, pipeline=pipeline.get("ANS_PIPELINE") or tracking.pipeline_key(pid),
            in_flow=flow_pid is not None, owner=int(flow_pid or pid), tags=tags, params=tracking.flat(params),
            settings=tracking.flat(settings), data=data, start_ms=int(time.time() * 1000),
        )  # fmt: skip
        self._warned = "ANS_STORE_AWAY" in pipeline  # the flow has said so
        self._to_say: str | None = None
        self._store: tuple[MlflowClient, str] | None = None
        self._ending, self._end_lock = Event(), Lock()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def _collect(self, metrics: dict[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        self.record.metrics += [
            (metric_name(key), float(value), now_ms, step) for key, value in metrics.items()
        ]

    def log(self, metrics: dict[str, float], step: int) -> str | None:
        self._collect(metrics, step)
        message, self._to_say = self._to_say, None
        return message

    def log_result(self, metrics: dict[str, float], folder: Path) -> str | None:
        """Log what the stage measured, for the pipeline's run too, and the files of its output."""
        self.record.result, self.record.files = metrics, str(folder)
        return self.log(metrics, 0)

    def end(self, *, ok: bool) -> str | None:
        """Send the rest. Where the store is still away, the next stage that runs in this workspace sends it.
        The first call counts."""
        with self._end_lock:
            if not self.finished:
                self.record.end_ms = int(time.time() * 1000)
                self.record.status = "FINISHED" if ok else "FAILED"
                self._ending.set()
                self._thread.join()
                if not self.record.sent:
                    try:
                        keep(
                            self.record,
                            self._root / UNSENT / f"{self.record.start_ms}-{self.record.stage}.json",
                        )
                    except OSError as error:
                        self._to_say = (
                            "MLflow did not take all that the stage logged, and it can't be kept, so it is "
                            f"lost: {error}"
                        )
                self.finished = True
            message, self._to_say = self._to_say, None
            return message

    def _work(self) -> None:
        if IMPORT.is_alive():
            IMPORT.join()  # a second thread importing it meanwhile would see a half-initialised module
        load, next_sample_s = Load(), 0.0
        wait_s, ending = 0.0, False
        while not ending:
            ending = self._ending.wait(wait_s)
            if time.monotonic() >= next_sample_s and not ending:
                next_sample_s = time.monotonic() + SAMPLE_EVERY_S
                self._collect(load.sample(), int(time.time() - self.record.start_ms / 1000))
            wait_s = SEND_EVERY_S if self._try() else RETRY_S

    def _try(self) -> bool:
        try:
            if self._store is None:
                mlflow = tracking.client(self._root)
                self._store = mlflow, tracking.experiment_id(mlflow, self._root)
                send_left(self._root, *self._store)
            send(self.record, *self._store, self._root)
        except tracking.store_faults() as error:
            if not self._warned:
                self._to_say = (
                    "MLflow takes nothing at present; the stage goes on, and what it logs is kept and sent "
                    f"later: {error}"
                )
            self._warned = True
            return False
        return True


def keep(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(record)))


def send_left(root: Path, mlflow: MlflowClient, experiment: str) -> None:
    """Send the runs of stages that ended while the store was away. A record that can't be read, of another
    version or damaged, or that MLflow refuses, is put aside as `<name>.refused`."""
    for path in sorted((root / UNSENT).glob("*.json")):
        try:
            record = Record(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            put_aside(path, error)
            continue
        if record.run_id and not has_run(mlflow, record.run_id):  # a new store
            record.run_id = None
        status = record.status
        try:
            send(record, mlflow, experiment, root)
            if record.in_flow and status and record.parent:  # its flow is over, or closes the run once more
                mlflow.set_terminated(record.parent, status, end_time=record.end_ms)
        except tracking.store_faults() as error:
            keep(record, path)
            if getattr(error, "error_code", None) != "INVALID_PARAMETER_VALUE":
                raise
            put_aside(path, error)
            continue
        path.unlink()


def put_aside(path: Path, error: Exception) -> None:
    aside = path.with_suffix(".refused")
    path.rename(aside)
    write_error(f"MLflow's record of an earlier stage is put aside as {aside}: {error}\n")


def has_run(mlflow: MlflowClient, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(mlflow.get_run(run_id))
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
