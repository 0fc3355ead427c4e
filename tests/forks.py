"""Processes that start at once: a server that has imported the stages forks one for each script. To import
them takes 7 s of processor time, and a test of two processes starts three or four. All processes of a pytest
run share one server.

What differs between processes in life and is equal here: the order of sets of texts. `ans_core` runs on two
processes of torchrun, too (tests/stages/test_stages.py, tests/evaluation/test_session.py)."""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.ports import free_port
from tasks.process import die_with_parent, imports_without_collector
from tests import RUNS, SHARED

ROOT = Path(__file__).resolve().parents[1]
STARTED: list[subprocess.Popen[str]] = []
"""Servers that this process has started."""


@dataclass(frozen=True)
class Ended:
    status: int
    """As `subprocess` gives it: -9 after SIGKILL."""
    said: str


def run(script: Path, *words: str, processes: int = 1) -> list[Ended]:
    """`python SCRIPT WORDS` on the CPU in so many processes that know of each other. If one fails, the others
    end, too."""
    of_all = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if processes > 1:
        of_all |= {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
    ranks = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {} for rank in range(processes)
    ]
    with tempfile.TemporaryDirectory() as folder:
        told = [Path(folder, str(rank)) for rank in range(processes)]
        environments = [{**os.environ, **of_all, **rank} for rank in ranks]
        asked = {
            "script": str(script),
            "words": words,
            "environments": environments,
            "told": [str(path) for path in told],
        }
        # where the test is ended, what it started ends, too
        with _connected() as connection, connection.makefile("rw") as line:
            print(json.dumps(asked), file=line, flush=True)
            statuses = json.loads(line.readline())
        return [
            Ended(status, path.read_text(errors="replace"))
            for status, path in zip(statuses, told, strict=True)
        ]


def _connected() -> socket.socket:
    """Return a connection to the server; whichever process of this pytest run asks first starts it."""
    address = Path(os.environ[SHARED], "forks")
    with address.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):  # not there yet; killed
            _start(address)
            connection.connect(str(address))
    return connection


def _start(address: Path) -> None:
    address.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forks", str(address)], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    STARTED.append(server)


def _serve(listening: socket.socket) -> None:
    """Answer until the pytest run has ended. Whoever started this process may end before: another one's tests
    go on."""
    with Path(os.environ[SHARED], RUNS).open() as runs:
        while True:
            if select.select([listening], [], [], 1.0)[0]:
                connection, _ = listening.accept()
                if os.fork() == 0:
                    try:
                        _answer(connection)
                    finally:  # it must not go on with this loop
                        os._exit(0)
                connection.close()
            with suppress(ChildProcessError):  # there is none
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            with suppress(BlockingIOError):
                fcntl.flock(runs, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return


def _answer(connection: socket.socket) -> None:
    """Start the processes of one request and tell how they ended. If one of them fails, or nobody waits any
    more, the others end."""
    die_with_parent()
    line = connection.makefile("rw")
    asked = json.loads(line.readline())
    pids = [_fork(asked, rank) for rank in range(len(asked["told"]))]
    found: dict[int, int] = {}
    while len(found) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            found[pid] = os.waitstatus_to_exitcode(status)
        left = select.select([connection], [], [], 0 if pid else 0.01)[0]
        ended = found.get(pid, 0)
        if (ended and ended < 128) or left:  # above, they all end by a signal, each after its state
            for other in set(pids) - set(found):
                os.kill(other, signal.SIGKILL)
    with suppress(BrokenPipeError):
        print(json.dumps([found[pid] for pid in pids]), file=line, flush=True)


def _fork(asked: dict[str, Any], rank: int) -> int:
    if pid := os.fork():
        return pid
    try:
        die_with_parent()
        os.environ.clear()
        os.environ.update(asked["environments"][rank])
        told = os.open(asked["told"][rank], os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(told, 1)
        os.dup2(told, 2)
        numpy.random.seed()  # noqa: NPY002  as two processes have it; torch and `random` do so by themselves
        sys.argv = [asked["script"], *asked["words"]]
        sys.path[0] = str(Path(asked["script"]).parent)
        sys.path.insert(1, str(ROOT))
        runpy.run_path(asked["script"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:  # noqa: BLE001  a fork must not go on with its parent's loop
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed talks while it is imported
    with imports_without_collector():
        import deepspeed
        import numpy

        from ans_core.stages import agent_evaluate, cota, evaluate, memory, online, rl, sft  # noqa: F401

    # Processes on the CPU talk by gloo: DeepSpeed's own way is compiled once for each virtual environment, a
    # minute of processor time.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(sys.argv[1])
        bound.listen()
        print("ready", file=answers, flush=True)
        answers.close()
        _serve(bound)
