"""The pipeline's run in MLflow, as a flow fills it. A store that is away stops no flow: it is said once, and
stages keep what they log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ans_core.config import Config
from tasks import registry, tracking
from tasks.stage_run import RETRY_S
from tasks.stages import Stage
from tasks.surroundings import lock_hash
from tasks.tracker import started

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")


class PipelineRun:
    """The run that the stages of one flow run have in common. `key` names it in the stages' environment."""

    def __init__(self, here: Path, config: Config, key: str) -> None:
        self._here, self._config, self._key = here, config, key
        self._start_ms = int(time.time() * 1000)
        self._next_try_s = 0.0
        self._tracker, self._ending = dict[str, str](), ExitStack()

    def _ask(self, question: Callable[[MlflowClient, str, str], T]) -> T | None:
        """Return the answer to a question about (client, experiment, this run's id); None while the store is
        away."""
        if time.monotonic() < self._next_try_s:
            return None
        try:
            mlflow = tracking.client(self._here)
            experiment = tracking.experiment_id(mlflow, self._here)
            run = tracking.parent_run(
                mlflow, experiment, self._key, self._config.profile, self._here, pid=os.getpid(),
                settings=tracking.flat(self._config.model_dump(mode="json")), start_ms=self._start_ms,
            )  # fmt: skip
            return question(mlflow, experiment, run)
        except tracking.store_faults() as error:
            if not self._next_try_s:
                tracking.warn(
                    "MLflow takes nothing at present; the pipeline goes on, and what stages log is kept "
                    f"and sent later: {error}"
                )
            self._next_try_s = time.monotonic() + RETRY_S
            return None

    def start(self, flow_run: str) -> None:
        """Open the run, and close those whose process is gone."""

        def open_run(mlflow: MlflowClient, experiment: str, run: str) -> None:
            tracking.close_stuck_runs(self._here)
            mlflow.set_tag(run, "prefect.flow_run", flow_run)

        self._ask(open_run)

    def environment(self) -> dict[str, str]:
        """Return what a stage finds this run by, and the process that logs to it, which the first call
        starts."""
        self._tracker = self._tracker or self._ending.enter_context(started())
        away = {"ANS_STORE_AWAY": "1"} if self._next_try_s else {}
        return {"ANS_PIPELINE": self._key, "ANS_PIPELINE_PID": str(os.getpid()), **self._tracker, **away}

    def durations_s(self) -> dict[str, float]:
        """Return how long each stage took when it last ran on this profile."""
        return self._ask(lambda *_: tracking.durations_s(self._here, self._config.profile)) or {}

    def cached(self, stage: Stage, state_key: str) -> float:
        """Link a cached stage to the run that made it; return how long that took, 0 if it is unknown."""
        made = self._ask(
            lambda mlflow, experiment, run: tracking.link_cached(
                mlflow, experiment, run, stage.name, state_key
            )
        )
        return float(made.data.metrics.get("duration_s", 0.0)) if made else 0.0

    def register(self, md5: str, state_key: str) -> None:
        """Register the converted checkpoint as challenger."""
        self._ask(lambda *_: registry.register(self._here, self._config.profile, md5, state_key))

    def end(self, *, ok: bool) -> None:
        self._ending.close()

        def close(mlflow: MlflowClient, experiment: str, run: str) -> None:
            mlflow.set_tag(run, "dvc.lock", lock_hash(self._here))
            tracking.describe(mlflow, experiment, run)
            mlflow.set_terminated(run, "FINISHED" if ok else "FAILED")

        self._next_try_s = min(self._next_try_s, time.monotonic())
        self._ask(close)
