"""A stage as a Unix process: it dies with its parent, ends cleanly on TERM, and locks the workspace."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from ans_core.processes import without_collector

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Send this process TERM when the thread that started it dies (Linux). Without it a stage outlives a
    killed flow.

    Raises SystemExit if its parent (the process that ANS_PARENT_PID names, or any but init) is gone already.
    In a container process 1 may be the parent: it starts processes in its own session, or each in a new one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        named = os.environ.pop("ANS_PARENT_PID", None)
        adopted = os.getppid() == 1 and os.getsid(0) not in {os.getpid(), os.getsid(1)}
        if os.getppid() != int(named) if named else adopted:
            raise SystemExit("the process that started this one is gone")


class _Unread:
    """A stream whose text is lost where nobody reads it any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            self._stream.flush()


def outlive_readers() -> None:
    """Let this process go on where the one that shows its output was killed: a bar that can't be shown would
    end it before it has written its state."""
    sys.stdout, sys.stderr = (cast("TextIO", _Unread(stream)) for stream in (sys.stdout, sys.stderr))


def write_error(lines: str) -> None:
    sys.stderr.write(lines)
    sys.stderr.flush()


def leave_note(**values: Any) -> None:
    """Add to the file that ANS_NOTE names: a stage tells the flow there what its exit status can't. Does
    nothing without ANS_NOTE."""
    if "ANS_NOTE" in os.environ:
        Path(os.environ["ANS_NOTE"]).write_text(json.dumps(own_note() | values), encoding="utf-8")


def own_note() -> dict[str, Any]:
    """Return what the processes of this stage have left; nothing without ANS_NOTE."""
    return read_note(Path(os.environ["ANS_NOTE"])) if "ANS_NOTE" in os.environ else {}


def read_note(path: Path) -> dict[str, Any]:
    """Read the note; empty if there is none, or if a killed process had only begun it."""
    try:
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return note
    except (FileNotFoundError, ValueError):
        return {}


def holder_of(path: Path) -> str:
    """Return who holds the lock that `held` takes; nothing if nobody does."""
    if not path.exists():
        return ""
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return ""


@contextmanager
def imports_without_collector() -> Iterator[None]:
    """Import without the garbage collector, which leaves alone for good what is there at the end."""
    with without_collector():
        yield
    gc.freeze()


@contextmanager
def held(path: Path, what: str) -> Iterator[int]:
    """Hold an exclusive lock that the kernel drops when its holder dies, and all children that were given the
    file that is yielded. While another process holds it, wait with a message."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        waited_s = 0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                if waited_s % 30 == 0:
                    write_error(f"{what} waits: {holder} is at work in this workspace\n")
                time.sleep(1)
                waited_s += 1
        file.truncate(0)
        file.write(f"{what} (pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')})")
        file.flush()
        try:
            yield file.fileno()
        finally:
            file.truncate(0)
