"""One node's part of a job of Slurm: run a module's words, outlive a signal until all processes have ended,
and tell by the exit status how it went.

    python -m tasks.slurm_task WORD...
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from ans_core import stop
from tasks.process import leave_note, own_note

ASKED, LATE, FAILED = 75, 76, 101
"""Exit statuses: a signal of Slurm ended it, USR1 since its time is nearly over; it failed. srun returns the
largest of all nodes, so one node that failed counts; or 137, if Slurm had to kill one, so a node leaves its
status as a file, too."""
PR_SET_CHILD_SUBREAPER = 36


def main(words: list[str]) -> int:
    signals: list[int] = []
    for number in stop.SIGNALS:
        signal.signal(number, lambda number, frame: signals.append(number))
    # Processes whose launcher has ended (torchrun does at a second TERM) become children of this one. If it
    # ended before them, Slurm would kill them while they write their state.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        [sys.executable, *words], env={**os.environ, "PET_NODE_RANK": os.environ.get("SLURM_NODEID", "0")}
    )
    status = child.wait()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    asked = LATE if signals[:1] == [signal.SIGUSR1] else ASKED
    ended = 0 if status == 0 else asked if signals else FAILED
    if "ANS_NOTE" in os.environ:
        if ended == FAILED and "status" not in own_note():
            node = os.environ.get("SLURMD_NODENAME", "?")
            why = "killed, mostly where memory is short, or it could not start"
            # status: FAILED of tasks/jobs.py, whose imports would delay the handlers of signals
            leave_note(status=1, message=f"a process of node {node} ended without a word ({why})")
        Path(os.environ["ANS_NOTE"]).with_suffix(f".{ended}").touch()
    return ended


if __name__ == "__main__":
    # At once: while Python clears up, a signal has its default effect again, and srun sends TERM to the other
    # nodes as soon as one has ended. The status would be that of a job that was killed.
    os._exit(main(sys.argv[1:]))
