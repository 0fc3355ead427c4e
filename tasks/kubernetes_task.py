"""One pod's part of a job of Kubernetes: run a module's words, outlive TERM until they have ended, and, on the
first node, leave their output and how they ended in files.

    python -m tasks.kubernetes_task NOTES LOG WORD...

A pod ends with 0 whatever the exit status of the words, which is in a file: after a pod that fails, as one
does that is taken away, Kubernetes starts all nodes again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType


def main(notes: str, log: str, *words: str) -> int:
    stopped: list[int] = []
    first = os.environ["PET_NODE_RANK"] == "0"
    if first:
        for suffix in ("json", "exit"):
            Path(f"{notes}.{suffix}").unlink(missing_ok=True)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
    child = subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.STDOUT, env=os.environ | {"ANS_NOTE": f"{notes}.json"}
    )

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        child.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    status = child.wait()
    if stopped:
        return 128 + signal.SIGTERM
    if first:
        Path(f"{notes}.exit").write_text(str(status), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
