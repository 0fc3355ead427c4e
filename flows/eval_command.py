"""What the pipeline adds to `ans eval`: a job where params.yaml says that stages are jobs, and figures in MLflow."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.paths import root

if TYPE_CHECKING:
    from ans_core.evaluation.session import Session

TAG_LETTERS = 5000
"""Of a tag in MLflow."""


def job_words(arguments: argparse.Namespace) -> list[str] | None:
    """Return what follows Python to run this command as a job, where params.yaml says so; None to run it
    here. Raises ValueError outside of the checkout, from which jobs start."""
    from ans_core.config import load
    from tasks.launcher import awaits_job, submit_words

    here = root()
    if arguments.device == "cpu" or "RANK" in os.environ or not (here / "params.yaml").exists():
        return None
    launch = load(here / "params.yaml").launch
    if not awaits_job(launch, os.environ):
        return None
    if Path.cwd() != here:
        raise ValueError(
            f"launch.launcher is {launch.launcher}, whose jobs start in {here}: call `ans eval` there, or "
            "give --device cpu"
        )
    processes = launch.of("evaluate").inference_processes
    # one for each GPU that is reserved
    shared = ["--processes", str(processes)] if processes > 1 and arguments.processes is None else []
    words = ["-m", "flows.cli", *sys.argv[1:], *shared]
    return submit_words(
        f"ans-eval-{hashlib.sha256(repr(words).encode()).hexdigest()[:12]}", "evaluate", words
    )


def log_to_mlflow(session: Session, metrics: dict[str, float], notes: Sequence[str]) -> None:
    """Log the metrics as eval/<benchmark>/<split>/<metric>, and the notes (which name a judge) as a tag. The
    result stands also if the store is away."""
    from mlflow.exceptions import MlflowException

    from tasks.tracking import TrackingError, log_finished, warn, where_from

    tags = {
        "ans.kind": "evaluation",
        "ans.pid": str(os.getpid()),
        "ans.notes": "\n".join(notes)[:TAG_LETTERS],
        **where_from(root()),
    }
    figures = {f"eval/{session.title}/{key}": value for key, value in metrics.items()}
    settings = {key: str(value)[:500] for key, value in session.settings.items()}
    try:
        log_finished(root(), f"eval {session.title}", tags=tags, params=settings, metrics=figures)
    except (MlflowException, TrackingError) as error:
        warn(f"MLflow did not take the figures, which are in {session.out}: {error}")
