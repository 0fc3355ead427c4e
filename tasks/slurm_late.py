"""Tell by the exit status whether a job of Slurm whose time is nearly over is to be queued again: not if that
came MOST times without a step in between.

    python -m tasks.slurm_late NOTE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tasks.jobs import USER_ERROR
from tasks.process import read_note

MOST = 2
"""Times that a stage without steps is queued again: one that keeps what it has (an evaluation) goes on, others
begin anew."""


def goes_on(note: Path) -> bool:
    """Count this time; where it was one too many, say why the job ends, in the note, too."""
    noted, path = read_note(note), note.with_suffix(".late")
    before = read_note(path)
    step, last = noted.get("step", -1), before.get("step", -1)
    times = 0 if step > last else before.get("times", 0) + 1
    path.write_text(json.dumps({"step": max(step, last), "times": times}))
    if times <= MOST:
        return True
    message = (
        f"its time (--time) was over {times} times without a step in between: give it more in launch.slurm or "
        "launch.resources"
    )
    print(message)  # into the job's log
    note.write_text(json.dumps(noted | {"status": USER_ERROR, "message": message}), encoding="utf-8")
    return False


if __name__ == "__main__":
    sys.exit(not goes_on(Path(sys.argv[1])))
