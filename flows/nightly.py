"""The `nightly-evals` flow: benchmarks of the newest checkpoints and the report, with the settings of params.yaml. It trains nothing."""

from __future__ import annotations

import os

from prefect import flow

from flows.paths import root
from flows.pipeline import Row, end_with_worker, run_name, run_stages
from tasks.process import held
from tasks.stages import STAGES

EVALUATION = tuple(stage for stage in STAGES if stage.task in {"evaluate", "report"})


@flow(name="nightly-evals", flow_run_name=run_name, retries=0)
def nightly_evals() -> list[Row]:
    """Evaluate; a row whose checkpoint and settings did not change since last night is cached."""
    end_with_worker()
    here = root()
    os.chdir(here)
    with held(here / ".ans/flow.lock", "nightly-evals"):
        return run_stages(EVALUATION, here)
