"""An evaluation's figures -> MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.paths import root

if TYPE_CHECKING:
    from ans_core.evaluation.session import Session

TAG_LETTERS = 5000
"""Of a tag in MLflow."""


def log_to_mlflow(session: Session, metrics: dict[str, float], notes: Sequence[str]) -> None:
    """Log the metrics as eval/<benchmark>/<split>/<metric>, and the notes (which name a judge) as a tag. The
    result stands also if the store is away."""
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException

    from tasks.tracking import TrackingError, client, experiment_id, metric_name, warn, where_from

    now_ms = int(time.time() * 1000)
    try:
        mlflow = client(root())
        tags = {
            "ans.kind": "evaluation",
            "ans.pid": str(os.getpid()),
            "ans.notes": "\n".join(notes)[:TAG_LETTERS],
            **where_from(root()),
        }
        run_id = mlflow.create_run(
            experiment_id(mlflow, root()), tags=tags, run_name=f"eval {session.title}"
        ).info.run_id
        logged = [
            Metric(metric_name(f"eval/{session.title}/{key}"), float(value), now_ms, 0)
            for key, value in metrics.items()
        ]
        mlflow.log_batch(
            run_id,
            metrics=logged,
            params=[Param(key, str(value)[:500]) for key, value in session.settings.items()],
        )
        mlflow.set_terminated(run_id)
    except (MlflowException, TrackingError) as error:
        warn(f"MLflow did not take the figures, which are in {session.out}: {error}")
