"""`ans run` on a pseudo terminal: what a person sees."""

import os
import pty
import re
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.stages import STAGES
from tests.workspace import LIMIT_S, end_all, environment, living, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]

COUNT = len(STAGES)


class Terminal:
    """A command that reads and writes a terminal of its own."""

    def __init__(self, folder: Path, *words: str, **extra: str) -> None:
        self.pid, self._screen = pty.fork()
        if self.pid == 0:
            termios.tcsetwinsize(0, (40, 160))
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background ignore it
            os.chdir(folder)
            os.execve(sys.executable, [sys.executable, *words], environment(folder, **extra))
        self.shown = ""

    def read_until(self, text: str | None) -> str:
        """All that was shown so far; None reads until the end."""
        deadline = time.monotonic() + LIMIT_S
        while text is None or text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} never came:\n{self.shown}"
            try:
                data = os.read(self._screen, 65536)
            except OSError:  # the other end is closed
                break
            self.shown = re.sub(r"\x1b\[[\d;]*m", "", self.shown + data.decode(errors="replace"))  # colours
        return self.shown

    def type(self, letters: str) -> None:
        os.write(self._screen, letters.encode())

    def end(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    yield make(tmp_path)
    end_all(tmp_path)


def test_a_terminal_shows_bars_as_bars_the_place_of_the_stage_and_no_traceback_after_ctrl_c(
    workspace: Path,
) -> None:
    terminal = Terminal(workspace, "-m", "flows.cli", "run", FAKE_BAR="prepare", FAKE_STALL="base:2")
    try:
        shown = terminal.read_until(f"stage 2 of {COUNT}: base")
        # nothing ran before: no time left is told
        assert re.search(rf"stage 1 of {COUNT}: prepare \(0:\d\d elapsed\)", shown)
        states = re.findall(r"a bar: [^\r\n]*", shown)
        assert len(states) > 5
        # its last state; the others were drawn over one another
        assert len(re.findall(r"a bar: [^\r\n]*\r?\n", shown)) == 1
        while not list(workspace.glob(".ans/scratch/smoke/base/*/step")):
            time.sleep(0.1)
        terminal.type("\x03")
        shown = terminal.read_until(None)
        assert terminal.end() == 130
    finally:
        os.kill(terminal.pid, signal.SIGKILL) if psutil.pid_exists(terminal.pid) else None
    assert shown.rstrip().endswith("stopped; the same command resumes")
    assert "Traceback" not in shown
    assert shown[shown.index(f"stage 2 of {COUNT}") :].count("\n") < 8, shown
    assert [process.cmdline() for process in living(workspace)] == []
