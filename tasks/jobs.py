"""A command as a job of a cluster: one job by name in a workspace, followed to its end; its exit status and
the reason of a failure come back.

A job outlives whoever submitted it by kill -9. Who starts the same thing again finds the job by its name and
waits for it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ans_core.config import ConfigError, Launch
from ans_core.config.launch import Resources
from ans_core.processes import CORES
from tasks.process import held, leave_note, read_note, write_error

IN_JOB = "ANS_JOB"
"""Set in a job of a cluster: the stage in there starts its processes itself."""
POLL_S = 5.0
SEEN_S = 60.0
"""Most that a shared folder takes to show what another node has written."""
USER_ERROR, FAILED = 2, 1
"""Exit statuses: a mistake that no retry mends; anything else."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that is to run. `words` follow Python."""

    name: str
    task: str
    words: tuple[str, ...]
    launch: Launch
    """Of this task."""
    processes: int
    """All that share the stage."""
    gpu: bool = True
    """Whether the stage wants one, where launch.device allows it."""
    distributed: bool
    """Whether the job starts each of them; else the stage does."""
    root: Path
    """A folder that all nodes share."""

    def __post_init__(self) -> None:
        nodes = self.resources.nodes
        if self.processes % nodes:
            raise ConfigError(
                f"launch.resources.{self.task} asks for {nodes} nodes, and launch.processes is {self.processes}, which counts "
                "those of all nodes: give a multiple of the nodes"
            )

    @property
    def resources(self) -> Resources:
        return self.launch.wanted(self.task)

    @property
    def on_gpu(self) -> bool:
        return bool(self.resources.gpus) or (self.gpu and self.launch.device != "cpu")

    @property
    def gpus(self) -> int:
        """Return the GPUs that it asks of each node; unless the settings say more, one for each process there."""
        return self.resources.gpus or self.on_gpu * self.processes_of_node

    @property
    def processes_of_node(self) -> int:
        return max(1, self.processes // self.resources.nodes)

    @property
    def notes(self) -> Path:
        """Return what the names of files about the job begin with. `<notes>-<number>.json`: what its stage
        noted; `.exit`: its exit status; `.stop`: it is asked to end; of Ray, which has no such states, `.job`:
        what it is, and `.begun`: it has its resources."""
        return self.root / ".ans/jobs" / self.name

    def log(self, number: str) -> Path:
        return self.root / ".ans/logs" / f"{self.name}-{number}.log"


@dataclass(frozen=True, kw_only=True)
class State:
    """How a job is: the cluster's word for it, and what it waits for (nothing if it waits for nothing)."""

    name: str
    waits_for: str = ""
    ended: bool = False
    by_itself: bool = False
    """The job's command has ended, or nobody knows what became of it."""
    cancelled: bool = False


class Cluster(Protocol):
    """What tasks/slurm.py, tasks/ray_jobs.py and tasks/kubernetes_jobs.py have. A job's number is a word that
    names it in its workspace."""

    def find(self, job: Job) -> str | None:
        """Return the number of the workspace's job of this name that has not ended."""

    def submit(self, job: Job, environment: dict[str, str]) -> str:
        """Submit it and return its number. Raises ConfigError for a job that the cluster refuses."""

    def state(self, job: Job, number: str) -> State: ...

    def cancel(self, job: Job, number: str) -> None: ...


def run(job: Job, cluster: Cluster) -> int:
    """Wait for the workspace's job of this name, which is submitted unless it waits or runs; return its exit
    status. A TERM to this process cancels the job. Raises ConfigError for a job that is refused."""
    job.notes.parent.mkdir(parents=True, exist_ok=True)
    job.log("").parent.mkdir(parents=True, exist_ok=True)
    # variables about this machine's files and processes stay here
    here = ("ANS_NOTE", "ANS_PARENT_PID", "ANS_TRACKER", CORES)
    environment = {key: value for key, value in os.environ.items() if key not in here}
    if job.resources.cpus:
        environment[CORES] = str(job.resources.cpus)
    number, how = None, ""
    try:
        with held(Path(f"{job.notes}.lock"), f"the start of {job.name}"):
            number = cluster.find(job)
            how = "goes on" if number else "is submitted"
            number = number or cluster.submit(job, environment)
            settings, wanted = Path(f"{job.notes}-{number}.launch"), job.launch.model_dump_json()
            if how == "is submitted":
                settings.write_text(wanted, encoding="utf-8")
            elif settings.exists() and settings.read_text(encoding="utf-8") != wanted:
                how += " with the `launch` that it was submitted with (cancel it for today's)"
        write_error(f"{job.name}: job {number} {how}; log: {job.log(number)}\n")
        return followed(job, number, cluster)
    except (SystemExit, KeyboardInterrupt):
        if how == "is submitted":  # perhaps it has been, and the answer is not there yet
            number = number or cluster.find(job)
        if number:
            cluster.cancel(job, number)
        raise


def unless_ending(job: Job, live: Callable[[], list[T]], ending: Callable[[T], bool]) -> T | None:
    """Return the job that is live. One that was cancelled, and writes its state, is waited for: whoever starts
    again wants a job that goes on from there."""
    waits = False
    while True:
        there = live()
        if not any(ending(one) for one in there):
            return there[0] if there else None
        if not waits:
            write_error(f"{job.name}: waits for the job before, which is ending\n")
        waits = True
        time.sleep(POLL_S)


def answer(
    ask: Callable[[], T],
    away: type[Exception],
    what: str,
    *,
    retry_s: float | None = None,
    say: Callable[[str], object] = write_error,
) -> T:
    """Return what is answered; while `ask` raises `away`, say once that `what` waits, and ask again every POLL_S or
    `retry_s`."""
    waits = False
    while True:
        try:
            return ask()
        except away as error:
            if not waits:
                say(f"{what} waits: {error}\n")
            waits = True
            time.sleep(POLL_S if retry_s is None else retry_s)


def followed(job: Job, number: str, cluster: Cluster) -> int:
    """Show the job's log as it grows, until the job has ended; return its exit status, and note the reason of
    a failure."""
    shown, queued_s, waits_for, ended = 0, 0.0, "", 0
    now_s = time.monotonic()
    while ended < 2:  # a job that is to be queued again has ended for a moment
        before_s, now_s = now_s, time.monotonic()
        state = cluster.state(job, number)
        ended = ended + 1 if state.ended else 0
        if state.waits_for:
            queued_s += now_s - before_s
            leave_note(queued_s=queued_s)
            if state.waits_for != waits_for:
                write_error(f"{job.name}: job {number} waits ({state.waits_for})\n")
            waits_for = state.waits_for
        shown = show(job.log(number), shown)
        if ended < 2:
            time.sleep(POLL_S)
    show(job.log(number), shown)
    return result(job, number, state)


def show(log: Path, start: int) -> int:
    """Show what a log has from a place on; return the place up to which it has been shown."""
    if not log.exists():
        return start
    with log.open("rb") as file:
        file.seek(start)
        sys.stderr.buffer.write(file.read())
        sys.stderr.buffer.flush()
        return file.tell()


def result(job: Job, number: str, state: State) -> int:
    """Return the exit status of a job that ended in this state, and pass on what its stage noted."""
    note, status = Path(f"{job.notes}-{number}.json"), Path(f"{job.notes}-{number}.exit")
    deadline_s = time.monotonic() + SEEN_S
    while state.by_itself and not status.exists() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    noted = read_note(note)
    log = noted.get("log", str(job.log(number)))
    if status.exists() and status.read_text(encoding="utf-8").strip() == "0":
        leave_note(log=log, **({"metrics": noted["metrics"]} if "metrics" in noted else {}))
        return 0
    how = f"job {number} ended as {state.name or 'one that is forgotten'} (its log: {job.log(number)})"
    code = USER_ERROR if state.cancelled else noted.get("status", FAILED)  # cancelled by somebody: no retry
    leave_note(log=log, status=code, message=f"{noted['message']}; {how}" if "message" in noted else how)
    write_error(f"{job.name}: {how}\n")
    return USER_ERROR if code == USER_ERROR else FAILED
