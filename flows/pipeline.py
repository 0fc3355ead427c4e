"""The `full-pipeline` flow: the stages of tasks/stages.py in order, each one a Prefect task that DVC decides to run or not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, State

from ans_core.config import load
from flows.child import SettingsError, repro
from flows.dvc_state import is_up_to_date
from flows.params import watch_sources, write_if_needed
from flows.paths import root
from tasks.process import held
from tasks.runner import state_key
from tasks.stages import STAGES, Stage
from tasks.tracking import client, experiment_id, last_run, parent_run

RETRY_DELAY_S = 5


def is_worth_a_retry(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Not for a mistake in the settings."""
    return not isinstance(state.result(raise_on_failure=False), SettingsError)


def run_stage(stage: Stage, here: Path, pipeline: str) -> State[None]:
    if is_up_to_date(stage.name, here):
        return Completed(name="Cached", message=f"{stage.name} is up to date (dvc.lock)")
    ran = repro(stage.name, root=here, timeout_s=stage.timeout_s, extra_environment={"ANS_PIPELINE": pipeline})
    return Completed(message=f"{stage.name} ran") if ran else Completed(name="Cached", message=f"{stage.name} came from DVC's run cache")


def prefect_task(stage: Stage) -> Any:
    """Prefect's own caching is off: dvc.lock is the one cache."""
    make = task(
        name=stage.name, version=stage.version, retries=stage.retries, retry_delay_seconds=RETRY_DELAY_S,
        retry_condition_fn=is_worth_a_retry, cache_policy=NO_CACHE, tags=["gpu"] if stage.gpu else [],
    )  # fmt: skip
    return make(run_stage)


def run_stages(stages: tuple[Stage, ...], here: Path) -> list[tuple[str, str, float]]:
    """(stage, `ran` or `cached`, seconds) of each, under one MLflow run; stops at the first that fails."""
    config = load(here / "params.yaml")
    pipeline = f"flow-{runtime.flow_run.id or os.getpid()}"
    mlflow = client(here)
    parent = parent_run(mlflow, experiment_id(mlflow, here), pipeline, config.profile, here)
    mlflow.set_tag(parent, "prefect.flow_run", str(runtime.flow_run.id))
    mlflow.set_tag(parent, "ans.pid", str(os.getpid()))
    rows, status = [], "FAILED"
    try:
        for stage in stages:
            start_s = time.monotonic()
            state = prefect_task(stage)(stage, here, pipeline, return_state=True)
            state.result()  # raises what the task raised
            cached = state.name == "Cached"
            rows.append((stage.name, "cached" if cached else "ran", time.monotonic() - start_s))
            if cached and (earlier := last_run(here, {"ans.stage": stage.name, "ans.key": state_key(stage, config, here)})):
                mlflow.set_tag(parent, f"cached.{stage.name.replace('@', '/')}", earlier.info.run_id)
                rows[-1] = (stage.name, "cached", earlier.data.metrics.get("duration_s", 0.0))
        status = "FINISHED"
    finally:
        mlflow.set_terminated(parent, status)
    return rows


@flow(name="full-pipeline", retries=0, log_prints=False)
def full_pipeline(profile: str | None = None) -> list[tuple[str, str, float]]:
    """From raw annotations to the report. `profile` writes params.yaml where it holds another one; None takes it as it is."""
    here = root()
    os.chdir(here)
    with held(here / ".ans/flow.lock", "full-pipeline"):
        if profile:
            write_if_needed(profile, here)
        for line in watch_sources(here):
            print(line)
        return run_stages(STAGES, here)
