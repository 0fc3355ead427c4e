"""Signals that ask a process to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, time
from ans_core import stop

stop.exit_on_signals()
with stop.deferred():
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.1)
    print("the step is done", flush=True)
print("went on", flush=True)
"""


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_after_the_last_look_at_it_ends_the_process_all_the_same(name: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=name)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, "the step is done\n")
