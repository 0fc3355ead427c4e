"""`ans eval` as a job, where params.yaml says that stages are jobs."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from flows.paths import root


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
