"""A job of tasks/jobs.py as one of Ray, by Ray's jobs API, for which no Ray is needed here; tasks/ray_task.py
runs there."""

from __future__ import annotations

import json
import os
import shlex
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from ans_core import stop
from ans_core.config import ConfigError
from tasks.jobs import IN_JOB, Job, State, answer, unless_ending

LIVE = {"PENDING", "RUNNING"}
NOT_YET = "No available agent to submit job"
"""In the answer of a Ray whose nodes are starting."""
TIMEOUT_S = 60.0
VARIABLES = {
    # A job that is stopped ends as Slurm's: after the step at work and its state.
    "RAY_JOB_STOP_WAIT_TIME_S": str(stop.LONGEST_S + 60),
    # NCCL wants to see the GPUs of all processes of a node, and ANS counts them by LOCAL_RANK.
    "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "1",
    "RAY_DEDUP_LOGS": "0",
}


def find(job: Job) -> str | None:
    """Return the number of the live job."""

    def live() -> list[str]:
        return [
            other["submission_id"].removeprefix(f"{job.name}-")
            for other in ask("", waits=False)
            if other["status"] in LIVE and other["metadata"] == _metadata(job)
        ]

    return unless_ending(job, live, lambda number: Path(f"{job.notes}-{number}.stop").exists())


def submit(job: Job, environment: dict[str, str]) -> str:
    number = uuid.uuid4().hex[:8]  # Ray takes no name twice
    notes = f"{job.notes}-{number}"
    # Ray's dashboard shows a job's command and variables: keys go by a file.
    path = Path(f"{notes}.job")
    path.touch(mode=0o600)
    content = {
        "name": f"{job.name}-{number}", "notes": notes, "root": str(job.root), **workers(job),
        "command": [sys.executable, *job.words], "environment": environment | {IN_JOB: "1"},
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")
    words = [job.launch.ray_python, "-P", "tasks/ray_task.py", notes]
    root, log = shlex.quote(str(job.root)), shlex.quote(str(job.log(number)))
    command = f"cd {root} && exec {shlex.join(words)} > {log} 2>&1"
    ask(
        "", submission_id=f"{job.name}-{number}", entrypoint=command, metadata=_metadata(job),
        runtime_env={"env_vars": VARIABLES},
    )  # fmt: skip
    return number


def workers(job: Job) -> dict[str, Any]:
    """Return how many workers of Ray Train the job has, and what each of them needs: of a training, or of a
    stage on several nodes, a core or its share of those asked for, and a GPU unless the settings say that it
    computes on a CPU."""
    cpus = job.resources.cpus
    if job.distributed or job.resources.nodes > 1:
        each = {"CPU": max(1, cpus // job.processes_of_node), "GPU": int(job.on_gpu)}
        return {"workers": job.processes, "each": each, "spread": job.resources.nodes == job.processes}
    return {"workers": 1, "each": {"CPU": cpus or job.processes, "GPU": job.gpus}, "spread": False}


def cancel(job: Job, number: str) -> None:
    Path(f"{job.notes}-{number}.stop").touch()  # for a start before Ray has told the job
    ask(f"{job.name}-{number}/stop", waits=False, post=True)


def state(job: Job, number: str) -> State:
    """Return a job's state; it has no name where Ray has forgotten the job."""
    try:
        name = ask(f"{job.name}-{number}")["status"]
    except LookupError:
        name = ""
    if name not in LIVE:
        Path(f"{job.notes}-{number}.job").unlink(missing_ok=True)  # keys, where Ray's Python could not start
    running = Path(f"{job.notes}-{number}.begun").exists()
    return State(
        name=name, waits_for="resources of Ray's nodes" if name in LIVE and not running else "",
        ended=name not in LIVE, by_itself=name != "STOPPED", cancelled=name == "STOPPED",
    )  # fmt: skip


def _metadata(job: Job) -> dict[str, str]:
    return {"ans": job.name, "folder": str(job.root)}


def ask(path: str, *, waits: bool = True, post: bool = False, **body: Any) -> Any:
    """Return what the jobs API answers; wait while it does not. Raises ConfigError where it refuses or,
    unless it `waits`, is away, and LookupError for a job that it does not have."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address.startswith(("http://", "https://")):
        raise ConfigError(
            f"launch.launcher is ray, and RAY_ADDRESS is {address!r}: set the address of Ray's jobs API, as "
            "http://head:8265"
        )
    headers = {"Content-Type": "application/json"}
    if token := _token():
        headers["Authorization"] = f"Bearer {token}"
    data = json.dumps(body).encode() if body or post else None
    request = urllib.request.Request(f"{address.rstrip('/')}/api/jobs/{path}", data, headers)

    def once() -> Any:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.load(response)
        except HTTPError as error:
            if error.code in {502, 503, 504}:  # a proxy's
                raise
            if error.code == 404:
                raise LookupError(path) from None
            text = error.read().decode(errors="replace").strip()
            if NOT_YET in text:
                raise OSError(text) from None
            if f"{body.get('submission_id')} already exists" in text:
                return None  # its number is this one's alone: the answer to the first request was lost
            last = text.rpartition("\n")[2]
            raise ConfigError(f"Ray at {address} refuses ({error}): {last}") from None
        except (URLError, TimeoutError, ConnectionError) as error:
            if not waits:
                raise ConfigError(f"RAY_ADDRESS is {address}, and nobody answers there: {error}") from None
            raise

    return answer(once, OSError, "Ray")


def _token() -> str:
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    return os.environ.get("RAY_AUTH_TOKEN") or (
        path.read_text(encoding="utf-8").strip() if path.exists() else ""
    )
