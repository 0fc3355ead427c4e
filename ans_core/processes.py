"""How processes of one machine start, how many threads each gets, and how they import much: settled before
torch is imported."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path

CORES = "ANS_CORES"
"""The variable that says how many of a node's cores a job of a cluster has, where the system lets it use more."""
CGROUPS = Path("/sys/fs/cgroup")
"""Where a container sees its limits: files of version 2, or a folder a controller of version 1."""
SPINS = "3000"
"""How often an idle thread of torch's libgomp spins before it sleeps."""


def shared_words(processes: int) -> list[str]:
    """Return what comes between Python and a module that so many processes of one machine share."""
    return ["-m", "torch.distributed.run", "--nnodes=1", "--standalone", f"--nproc-per-node={processes}"]


def run_in(processes: int) -> int:
    """Run this `ans` command in so many processes; return its exit status."""
    command = [sys.executable, *shared_words(processes), "-m", "ans_core.cli", *sys.argv[1:]]
    variables = thread_variables(0, processes=processes, environment=os.environ)
    return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def thread_variables(threads: int, *, processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set threads (0: the processes share the cores), as far as the user has not.
    They must be there before torch is imported, and before torchrun, which would give each of several
    processes one thread.

    Idle threads spin for some microseconds, because small operations follow one another, and then sleep: the
    default's longer spinning slows down any second program, and is slowed down by it (LOG)."""
    variables = (
        {} if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys() else {"GOMP_SPINCOUNT": SPINS}
    )
    if threads:
        return variables | {"OMP_NUM_THREADS": str(threads)}
    limited = CORES in environment or core_quota() < len(os.sched_getaffinity(0))
    if (processes > 1 or limited) and "OMP_NUM_THREADS" not in environment:
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
    return variables


def cores() -> int:
    """Return how many cores the processes of this run may use on this machine."""
    usable = min(len(os.sched_getaffinity(0)), core_quota())
    return min(usable, int(os.environ.get(CORES) or usable))


def core_quota(groups: Path = CGROUPS) -> int:
    """Return how many cores a container lets its processes use at once, rounded up, which affinity does not say
    (`docker run --cpus`, limits of Kubernetes); sys.maxsize without a limit."""
    texts = texts_of(groups, "cpu.max") or texts_of(groups, "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    quota, period = texts or ("max", "")
    return sys.maxsize if quota in {"max", "-1"} else math.ceil(int(quota) / int(period))


def memory_limit(groups: Path = CGROUPS) -> int:
    """Return how many bytes the processes of a container may hold together; sys.maxsize without a limit."""
    texts = texts_of(groups, "memory.max") or texts_of(groups, "memory/memory.limit_in_bytes")
    return int(texts[0]) if texts and texts[0] != "max" else sys.maxsize


def texts_of(folder: Path, *names: str) -> list[str]:
    """Return the words of the files that are there."""
    files = (folder / name for name in names)
    return [word for file in files if file.is_file() for word in file.read_text(encoding="utf-8").split()]


def forks_with(module: str) -> ForkServerContext:
    """Return a context whose processes are forked from a server that has imported `module`: a fork of a process with
    threads may hang, and a fresh interpreter imports for seconds. The first call in a process starts the server.

    The server looks for modules where this process does. Python would have it look in the working directory first
    (up to 3.13 at least), where a user may have a `datasets.py` or another checkout."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    places = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    before = {name: os.environ.get(name) for name in places}
    os.environ.update(places)
    try:
        ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


@contextmanager
def without_collector() -> Iterator[None]:
    """Import without the garbage collector: imports make a million objects that stay, and to walk through them
    again and again takes a sixth of 7 s (torch and transformers) or 0.6 of 3.4 s (Prefect and MLflow)."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
