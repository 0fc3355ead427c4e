"""A DVC stage's name in, `dvc repro --single-item` as a process group of its own: ended by a watchdog, and with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

from flows.paths import environment

BUSY_RETRY_S = 15
GRACE_S = 30
POLL_S = 0.2
ADVICE = (
    "To track the changes with git, run:", "git add dvc.lock",
    "git add dvc.lock metrics/.gitignore", "git add metrics/.gitignore dvc.lock",
    "To enable auto staging, run:", "dvc config core.autostage true", "Use `dvc push` to send your updates to remote storage.",
    "Updating lock file 'dvc.lock'", "Generating lock file 'dvc.lock'",
)  # fmt: skip
"""What dvc tells a person who typed the command."""

# Set in the child before it becomes dvc: a pre-exec function in this (threaded) process could deadlock.
LAUNCH = "from tasks.process import die_with_parent; import os, sys; die_with_parent(); os.execv(sys.executable, sys.argv[1:])"


class StageFailedError(RuntimeError):
    """The stage's own message is on the screen and in its log file; this names the stage and how it ended."""


class SettingsError(StageFailedError):
    """A mistake that no retry mends."""


def end_group(process: subprocess.Popen[str]) -> None:
    """TERM to the whole group, KILL after a grace period."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_once(command: list[str], *, root: Path, timeout_s: float, extra_environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output (which is also shown as it comes). Raises TimeoutError after ending the group."""
    environ = {
        **environment(),
        **extra_environment,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, sys.executable, *command],
        cwd=root, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []

    def relay() -> None:
        assert process.stdout is not None, "opened with a pipe"
        line = ""
        while piece := process.stdout.read(1):
            line += piece
            if piece in "\r\n":  # a progress bar ends its lines with a carriage return
                lines.append(line)
                if line.strip() not in ("", *ADVICE):
                    sys.stderr.write(line)
                    sys.stderr.flush()
                line = ""
        lines.append(line)

    reader = Thread(target=relay, daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + timeout_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end after {timeout_s:.0f} s")
            time.sleep(POLL_S)
    finally:
        end_group(process)
        reader.join(timeout=5)
    return process.returncode, "".join(lines)


def repro(name: str, *, root: Path, timeout_s: float, extra_environment: dict[str, str]) -> bool:
    """Runs one stage, or takes its result from DVC's run cache (then False); waits while another dvc command is at work."""
    command = ["-m", "dvc", "repro", "--single-item", name]
    waited_s = 0
    while True:
        status, output = run_once(command, root=root, timeout_s=timeout_s, extra_environment=extra_environment)
        if status == 0:
            return "is cached - skipping run" not in output
        if "is busy" not in output and "Unable to acquire lock" not in output:
            break
        if waited_s == 0:
            print(f"{name} waits: another dvc command is at work in {root}", file=sys.stderr, flush=True)
        time.sleep(BUSY_RETRY_S)
        waited_s += BUSY_RETRY_S
    error = SettingsError if "exited with 2" in output else StageFailedError
    raise error(f"stage {name} failed (status {status}); its message is above and in .ans/logs")
