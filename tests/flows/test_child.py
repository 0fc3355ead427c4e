import sys
import time
from pathlib import Path

import psutil
import pytest

from flows import child

ROOT = Path(__file__).resolve().parents[2]


def test_the_watchdog_ends_the_whole_process_group(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    grandchild = f"import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open({str(note)!r}, 'w').write(str(p.pid)); p.wait()"
    with pytest.raises(TimeoutError, match="no end after 3 s"):
        child.run_once(["-c", grandchild], root=ROOT, timeout_s=3, extra_environment={})
    time.sleep(0.5)
    pid = int(note.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_output_is_shown_as_it_comes_without_dvcs_advice(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "print('a bar\\r', end=''); print('To track the changes with git, run:'); print('done')"
    status, output = child.run_once(["-c", lines], root=ROOT, timeout_s=30, extra_environment={"ANS_X": "1"})
    assert status == 0
    assert "To track" in output
    shown = capsys.readouterr().err
    assert "done" in shown
    assert "To track" not in shown


def test_a_busy_repository_is_waited_for_and_a_mistake_in_the_settings_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        (255, "ERROR: 'x' is busy, it is being blocked by"),
        (0, "Stage 'sft' is cached - skipping run, checking out outputs"),
    ]
    monkeypatch.setattr(child, "run_once", lambda *words, **settings: answers.pop(0))
    monkeypatch.setattr(child, "BUSY_RETRY_S", 0)
    assert child.repro("sft", root=ROOT, timeout_s=1, extra_environment={}) is False
    assert "sft waits: another dvc command is at work" in capsys.readouterr().err
    answers.append((255, "ERROR: failed to reproduce 'sft': failed to run: python -m tasks.sft, exited with 2"))
    with pytest.raises(child.SettingsError, match="stage sft failed"):
        child.repro("sft", root=ROOT, timeout_s=1, extra_environment={})


def test_the_interpreter_of_the_child_is_this_one() -> None:
    _, output = child.run_once(["-c", "import sys; print(sys.executable)"], root=ROOT, timeout_s=30, extra_environment={})
    assert output.strip() == sys.executable
