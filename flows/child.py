"""Run `dvc repro --single-item` for a stage as a process group of its own, which a watchdog ends, and which
ends with its parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from ans_core import stop
from flows.dvc_state import BUSY
from flows.paths import environment
from tasks.jobs import USER_ERROR, answer
from tasks.process import read_note, write_error

BUSY_RETRY_S = 15
GRACE_S = 30
"""That a command has after TERM which hangs, or which has no state to write."""
STATE_GRACE_S = stop.LONGEST_S + GRACE_S
"""That a stage has, which ends after its step at work and a state of it."""
POLL_S = 0.2
STOPPED_S = 600.0
"""Seconds after which the watchdog ends a stage of which a process is stopped."""
LOOK_EVERY_S = 15.0
"""Seconds between two looks for stopped processes."""
BAR_EVERY_S = 30.0
"""Seconds between two states of a progress bar in a file; a terminal shows bars unchanged."""
LOG_TAIL_LINES = 20
HUNG = "\nTimeout ("
"""With this faulthandler begins."""

# Set in the child before it becomes dvc: a pre-exec function in this (threaded) process could deadlock.
LAUNCH = (
    "from tasks.process import die_with_parent; import os, sys; die_with_parent(); os.execv(sys.executable, "
    "sys.argv[1:])"
)


Say = Callable[[str], object]
"""Takes whole lines of output."""


class StageFailedError(RuntimeError):
    """Names the stage, how it ended, its own message and the end of its log."""


class SettingsError(StageFailedError):
    """A mistake in the settings, which no retry mends."""


def end_group(process: subprocess.Popen[Any], *, grace_s: float = GRACE_S) -> None:
    """End a command's whole group; does nothing if the command has ended by itself."""
    if process.poll() is None or process.returncode < 0:
        end_processes(process.pid, grace_s=grace_s)
        process.wait()


def end_processes(group: int, *, grace_s: float) -> None:
    """Send TERM to a group (and CONT: a stopped process answers nothing else), and KILL after a grace
    period."""
    deadline = time.monotonic() + grace_s
    with suppress(ProcessLookupError):  # the group is empty
        os.killpg(group, signal.SIGTERM)
        os.killpg(group, signal.SIGCONT)
        while statuses(group) - {psutil.STATUS_ZOMBIE} and time.monotonic() < deadline:
            time.sleep(POLL_S)
        os.killpg(group, signal.SIGKILL)


def statuses(group: int) -> set[str]:
    """Return psutil's statuses of the group's processes. A stopped one (SIGSTOP, a debugger) holds GPU and
    workspace until somebody notices."""
    states = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group:
                states.add(process.status())
    return states


class BarThinner:
    """Turn output bytes into lines for a file; of a bar's states (they end with a carriage return) keep one
    every BAR_EVERY_S."""

    def __init__(self) -> None:
        self._rest = b""
        self._shown_s = time.monotonic()

    def feed(self, data: bytes) -> str:
        pieces = (self._rest + data).splitlines(keepends=True)
        self._rest = b"" if not pieces or pieces[-1].endswith((b"\r", b"\n")) else pieces.pop()
        shown = ""
        for piece in pieces:
            line = piece.decode(errors="replace").rstrip("\r\n")
            if not line.strip():
                continue
            if piece.endswith(b"\r"):
                if time.monotonic() - self._shown_s < BAR_EVERY_S:
                    continue
                self._shown_s = time.monotonic()
            shown += line + "\n"
        return shown


def relay(pipe: int, say: Say) -> None:
    """Hand a child's output, line by line, to `say` until nobody holds the other end."""
    thinner = BarThinner()
    while data := os.read(pipe, 65536):
        if shown := thinner.feed(data):
            say(shown)
    if shown := thinner.feed(b"\n"):
        say(shown)


def run_once(
    command: list[str],
    *,
    root: Path,
    timeout_s: float,
    extra_environment: Mapping[str, str] = {},
    say: Say = write_error,
) -> int:
    """Run a command and return its exit status. A terminal gets its output unchanged, `say` elsewhere. Raises
    TimeoutError, after ending the group, for a command that takes too long or is stopped. One that is
    interrupted has the time to write its state."""
    environ = {
        **environment(),
        **extra_environment,
        "ANS_PARENT_PID": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    terminal = sys.stderr.isatty()
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, sys.executable, *command], cwd=root, env=environ,
        start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=sys.stderr if terminal else subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    reader = None
    if process.stdout is not None:
        reader = Thread(target=relay, args=(process.stdout.fileno(), say), daemon=True)
        reader.start()
    note = extra_environment.get("ANS_NOTE")
    grace_s: float = STATE_GRACE_S
    try:
        watch(
            process,
            timeout_s,
            queued_s=lambda: float(read_note(Path(note)).get("queued_s", 0.0)) if note else 0.0,
        )
    except TimeoutError:
        grace_s = GRACE_S
        raise
    except BaseException:
        say(f"ending; a training first writes the state of its step (within {stop.LONGEST_S} s)\n")
        raise
    finally:
        end_group(process, grace_s=grace_s)
        if reader:
            reader.join(timeout=5)
    return process.returncode


def watch(
    process: subprocess.Popen[Any], timeout_s: float, queued_s: Callable[[], float] = lambda: 0.0
) -> None:
    """Wait for a command's end. Raises TimeoutError if it takes too long or is stopped. queued_s: its time in
    a cluster's queue, which does not count."""
    deadline = time.monotonic() + timeout_s
    went_on_s = next_look_s = time.monotonic()
    while process.poll() is None:
        now_s = time.monotonic()
        if now_s > deadline and now_s > deadline + queued_s():
            raise TimeoutError(f"no end after {timeout_s:.0f} s")
        if now_s >= next_look_s:
            next_look_s = now_s + LOOK_EVERY_S
            if psutil.STATUS_STOPPED not in statuses(process.pid):
                went_on_s = now_s
            elif now_s - went_on_s > STOPPED_S:
                raise TimeoutError(f"a process of it has been stopped (SIGSTOP) for {STOPPED_S:.0f} s")
        time.sleep(POLL_S)


def run_noted(
    command: list[str], *, extra_environment: Mapping[str, str], **how: Any
) -> tuple[int, dict[str, Any]]:
    """Run a command as `run_once` does; return its exit status and what it noted (`tasks.process`)."""
    with tempfile.TemporaryDirectory(prefix="ans-") as folder:
        note = Path(folder) / "note.json"
        status = run_once(command, extra_environment={**extra_environment, "ANS_NOTE": str(note)}, **how)
        return status, read_note(note)


def repro(
    name: str,
    *,
    root: Path,
    timeout_s: float,
    extra_environment: Mapping[str, str],
    force: bool = False,
    say: Say = write_error,
) -> dict[str, float] | None:
    """Run one stage that is not up to date (`are_up_to_date` has hashed its code), with `force` any, and
    return its metrics; None if its result came from DVC's run cache. Wait while another dvc command is at
    work."""
    command = ["-m", "flows.dvc_state", name, "--force" if force else "--hashed"]

    def once() -> tuple[int, dict[str, Any]]:
        status, noted = run_noted(
            command, root=root, timeout_s=timeout_s, extra_environment=extra_environment, say=say
        )
        if status == BUSY:
            raise BlockingIOError(f"another dvc command is at work in {root}")
        return status, noted

    status, noted = answer(once, BlockingIOError, name, retry_s=BUSY_RETRY_S, say=say)
    if status == 0:
        return noted.get("metrics", {}) if "log" in noted else None
    error = SettingsError if noted.get("status") == USER_ERROR else StageFailedError
    raise error(failure(name, status, noted))


def failure(name: str, status: int, noted: dict[str, Any]) -> str:
    """Return the stage's own message and the end of its log; for a killed stage, the end of its log alone."""
    how = f"signal {-status}" if status < 0 else f"status {status}"
    lines = [f"stage {name} failed ({how}): {noted.get('message', 'it ended without a word (killed?)')}"]
    if (log := noted.get("log")) and Path(log).exists():  # a job that never began has none
        tail = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        lines += [f"the end of {log}:", *tail] if tail else [f"log: {log}"]
        lines += [f"where a process hung: {path}" for path in stacks_of(Path(log))]
    return "\n".join(lines)


def stacks_of(log: Path) -> list[Path]:
    """Return the logs of this start of a stage, one a process, that hold the stacks of a step that hung
    (`ans_core.train.watch.hang_watch`)."""
    name = re.fullmatch(r"(.+-)(\d{8}-\d{6})", log.stem)
    if name is None:  # a scheduler's, of a job that ended before its stage began
        return []
    since_s = time.mktime(time.strptime(name[2], "%Y%m%d-%H%M%S"))
    logs = [log, *sorted(log.parent.glob(f"{name[1]}*-process*.log"))]
    return [
        path
        for path in logs
        if path.stat().st_mtime >= since_s and HUNG in path.read_text(encoding="utf-8", errors="replace")
    ]
