"""Processes that start at once: a server that has imported the stages forks one for each script. To import them takes 7 s of processor
time, and a test of two processes starts three or four.

What differs between processes in life and is equal here: the order of sets of texts. `ans_core` runs on two processes of torchrun, too
(tests/stages/test_stages.py, tests/flows/test_eval_run.py)."""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tasks.launcher import free_port
from tasks.process import die_with_parent

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    status: int
    """As `subprocess` gives it: -9 after SIGKILL."""
    said: str


def run(script: Path, *words: str, processes: int = 1) -> list[Ended]:
    """`python SCRIPT WORDS` on the CPU in so many processes that know of each other. If one fails, the others end, too."""
    of_all = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if processes > 1:
        of_all |= {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {} for rank in range(processes)]
    with tempfile.TemporaryDirectory() as folder:
        told = [Path(folder, str(rank)) for rank in range(processes)]
        environments = [{**os.environ, **of_all, **rank} for rank in ranks]
        asked = {"script": str(script), "words": words, "environments": environments, "told": [str(path) for path in told]}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            print(json.dumps(asked), file=server.stdin, flush=True)
            statuses = json.loads(server.stdout.readline())
        except BaseException:  # also where the test is ended: the next one must not get this one's answer
            server.kill()
            _server.cache_clear()
            raise
        return [Ended(status, path.read_text(errors="replace")) for status, path in zip(statuses, told, strict=True)]


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.forks"], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip


def _serve(answers: TextIO) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        pids = [_fork(asked, rank) for rank in range(len(asked["told"]))]
        found: dict[int, int] = {}
        while len(found) < len(pids):
            pid, status = os.wait()
            found[pid] = os.waitstatus_to_exitcode(status)
            if found[pid]:
                for other in set(pids) - set(found):
                    os.kill(other, signal.SIGKILL)
        print(json.dumps([found[pid] for pid in pids]), file=answers, flush=True)


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
    gc.disable()
    import deepspeed  # noqa: F401
    import numpy

    from ans_core.stages import agent_evaluate, cota, evaluate, memory, online, rl, sft  # noqa: F401

    gc.freeze()
    gc.enable()
    die_with_parent()
    _serve(answers)
