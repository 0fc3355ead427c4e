import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows import child, dvc_state
from tasks.process import leave_note
from tests.workspace import make, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "said"), [("", "no end after 10 s"), ("p.send_signal(19); ", "stopped .SIGSTOP. for 1 s")]
)
def test_the_watchdog_ends_the_whole_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str, said: str
) -> None:
    monkeypatch.setattr(child, "STOPPED_S", 1.0)
    monkeypatch.setattr(child, "LOOK_EVERY_S", 0.2)
    note = tmp_path / "pid"
    start = (
        f"p = subprocess.Popen(['sleep', '600']); open({str(note)!r}, 'w').write(str(p.pid)); {stop}p.wait()"
    )
    with pytest.raises(TimeoutError, match=said):
        child.run_once(
            ["-c", f"import subprocess; {start}"],
            root=ROOT,
            timeout_s=600 if stop else 10,
            extra_environment={},
        )
    deadline = time.monotonic() + 60
    pid = int(note.read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "is_there"), [(KeyboardInterrupt, True), (TimeoutError, False)])
def test_a_stage_that_is_interrupted_has_time_for_its_state_and_one_that_hangs_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], is_there: bool
) -> None:
    state, begun = tmp_path / "state", tmp_path / "begun"

    def interrupted(*_: object, **__: object) -> None:
        deadline = time.monotonic() + 60
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise error

    monkeypatch.setattr(child, "GRACE_S", 0.5)
    monkeypatch.setattr(child, "watch", interrupted)
    stage = (
        "import signal, sys, time; from pathlib import Path\n"
        f"def end(*_): time.sleep(2); Path({str(state)!r}).touch(); sys.exit(143)\n"
        f"signal.signal(15, end); Path({str(begun)!r}).touch(); time.sleep(600)"
    )
    said: list[str] = []
    with pytest.raises(error):
        child.run_once(["-c", stage], root=ROOT, timeout_s=600, say=said.append)
    assert state.exists() == is_there
    assert any("a training first writes the state" in line for line in said) == is_there


def test_a_stopped_stage_ends_with_a_flow_that_was_killed() -> None:
    """The kernel sends dvc's process a TERM then."""
    stage = "import subprocess; p = subprocess.Popen(['sleep', '600']); p.send_signal(19); print(p.pid, flush=True); p.wait()"
    dvc = f"import signal; from flows import dvc_state; signal.signal(15, dvc_state.end_all); {stage}"
    process = subprocess.Popen(
        [sys.executable, "-c", dvc], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    stopped = psutil.Process(int(process.stdout.readline()))
    process.terminate()
    assert process.wait(60) == -15
    deadline = time.monotonic() + 60
    while stopped.is_running() and stopped.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_file_gets_every_line_and_of_a_bar_a_state_every_half_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(child.time, "monotonic", lambda: now)
    thinner = child.BarThinner()
    shown = thinner.feed(b"begins\r\n")
    for second in range(1, 91):  # a tenth of a second of output at a time, cut anywhere
        now = float(second)
        shown += thinner.feed(f"\rsft: {second}%".encode()) + thinner.feed(b"|##")
    shown += (
        thinner.feed("\rsft: 100%|##\nfertig: äö".encode()[:-1])
        + thinner.feed("ö".encode()[1:])
        + thinner.feed(b"\n")
    )
    assert shown.splitlines() == [
        "begins",
        "sft: 29%|##",
        "sft: 59%|##",
        "sft: 89%|##",
        "sft: 100%|##",
        "fertig: äö",
    ]


def test_a_busy_repository_is_waited_for_and_failures_tell_what_the_stage_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "sft.log"
    log.write_text("".join(f"step {i}\n" for i in range(100)))
    # Exit status and what the stage leaves in its note: busy, from the run cache, ran, a mistake in the
    # settings, killed.
    answers: list[tuple[int, dict[str, object]]] = [
        (dvc_state.BUSY, {}), (0, {}), (0, {"log": str(log), "metrics": {"loss": 0.5}}),
        (1, {"status": 2, "message": "rl.temprature: unknown setting"}), (-9, {"log": str(log)}),
    ]  # fmt: skip

    def run_once(*_words: object, extra_environment: dict[str, str], **_settings: object) -> int:
        status, told = answers.pop(0)
        monkeypatch.setenv("ANS_NOTE", extra_environment["ANS_NOTE"])
        leave_note(**told)
        return status

    monkeypatch.setattr(child, "run_once", run_once)
    monkeypatch.setattr(child, "BUSY_RETRY_S", 0)

    def repro() -> dict[str, float] | None:
        return child.repro("sft", root=ROOT, timeout_s=1, extra_environment={})

    assert repro() is None
    assert "sft waits: another dvc command is at work" in capsys.readouterr().err
    assert repro() == {"loss": 0.5}
    with pytest.raises(child.SettingsError, match=r"rl\.temprature: unknown setting"):
        repro()
    with pytest.raises(child.StageFailedError) as killed:
        repro()
    assert (
        str(killed.value).splitlines()[0] == "stage sft failed (signal 9): it ended without a word (killed?)"
    )
    assert str(killed.value).splitlines()[2:] == [f"step {i}" for i in range(80, 100)]


def test_a_child_whose_parent_is_gone_before_it_looks_ends_at_once(tmp_path: Path) -> None:
    """`dvc` killed just as a stage starts: the signal of its death has come too early to be seen."""
    orphan = "import os; from tasks.process import die_with_parent; die_with_parent(); print('works on')"
    started = f"subprocess.call([sys.executable, '-c', {orphan!r}])"
    middle = f"import os, subprocess, sys; os.environ['ANS_PARENT_PID'] = '1'; sys.exit({started})"
    assert child.run_once(["-c", orphan], root=ROOT, timeout_s=60, extra_environment={}) == 0
    assert child.run_once(["-c", middle], root=ROOT, timeout_s=60, extra_environment={}) == 1


def test_the_interpreter_of_the_child_is_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    child.run_once(["-c", "import sys; print(sys.executable)"], root=ROOT, timeout_s=60, extra_environment={})
    assert capsys.readouterr().err.strip() == sys.executable


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty or cut"),
        ("schema: '2.0'\n", "is empty or cut"),
        ("stages:\n", "is empty or cut"),
        (
            "stages:\n<<<<<<< HEAD\n  sft: {}\n=======\n  sft: {}\n>>>>>>> other\n",
            r"line \d+ is no YAML \(a merge conflict\?\)",
        ),
        ("stages:\n  sft:\n    cmd: 'exec py", r"line \d+ is no YAML"),
    ],
    ids=["empty", "schema only", "no stages", "conflict", "cut"],
)
def test_a_spoiled_lock_file_is_one_sentence_before_anything_runs(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "dvc.lock").write_text(text)
    with pytest.raises(ValueError, match=f"dvc.lock.*{said}.*git checkout {tmp_path}/dvc.lock`"):
        dvc_state.are_up_to_date(["sft"], tmp_path)


def test_the_time_left_is_told_where_every_stage_that_is_left_has_run_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flows import pipeline

    monkeypatch.setattr(pipeline.time, "monotonic", lambda: 1000.0)
    prepare, base, third = pipeline.STAGES[:3]
    took = {base.name: 3600.0, third.name: 61.4}
    clock = pipeline.Clock(start_s=995.0, profile="mine", stages=(prepare, base, third), durations_s=took)
    assert clock.place(prepare) == "stage 1 of 3: prepare (0:05 elapsed)"
    assert clock.place(base) == "stage 2 of 3: base (0:05 elapsed, at most about 1:01:01 left)"


def test_the_first_run_of_the_demo_tells_the_time_left_by_what_its_first_stage_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flows import durations, pipeline

    monkeypatch.setattr(pipeline.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(durations, "USUAL_S", {"quick": {"prepare": 40.0, "base": 100.0, "memory": 20.0}})
    stages = pipeline.STAGES[:3]
    clock = pipeline.Clock(start_s=995.0, profile="quick", stages=stages, durations_s={})
    assert clock.place(stages[0]) == "stage 1 of 3: prepare (0:05 elapsed)"
    clock.done_s["prepare"] = 20.0  # half of the usual
    assert clock.place(stages[1]) == "stage 2 of 3: base (0:05 elapsed, at most about 1:00 left)"


def test_the_usual_times_are_of_the_stages_that_there_are() -> None:
    from flows import durations, pipeline

    assert all(
        set(usual) == {stage.name for stage in pipeline.STAGES} for usual in durations.USUAL_S.values()
    )


def test_a_lock_file_that_is_not_written_to_its_end_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dvc.utils.serialize import _common, _yaml

    for module in (_common, _yaml):
        monkeypatch.setattr(module, "_dump_data", module._dump_data)
    dvc_state.write_files_atomically()
    lock = tmp_path / "dvc.lock"
    _yaml.dump_yaml(str(lock), {"stages": {}})

    def stopped(data: object, stream: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_yaml, "_dump", stopped)
    with pytest.raises(KeyboardInterrupt):
        _yaml.dump_yaml(str(lock), {"stages": {"a": {}}})
    assert lock.read_text() == "stages: {}\n"
    monkeypatch.undo()
    _yaml.dump_yaml(str(lock), {"stages": {}})


@pytest.mark.slow
def test_what_is_up_to_date_is_told_where_the_shell_finds_no_python(tmp_path: Path) -> None:
    """`.venv/bin/ans run`, the environment not activated."""
    workspace = make(tmp_path)
    asked = "from pathlib import Path; from flows.dvc_state import are_up_to_date; print(are_up_to_date(['prepare'], Path.cwd()))"
    assert run(workspace, "-c", asked, PATH="/nowhere") == "False\n"
    assert (workspace / "runs/code.yaml").is_file()


def test_a_failure_names_the_logs_in_which_processes_hung(tmp_path: Path) -> None:
    hung = "step 3 {}\nTimeout (0:10:00)!\nThread 0x1 (most recent call first):\n"
    contents = {
        "smoke-sft-20260102-030405.log": "step 3 {}\n",
        "smoke-sft-20260102-030406-process1.log": hung,
        "smoke-sft-20260101-030405-process1.log": hung,  # of an earlier start
        "smoke-rl-20260102-030406-process1.log": hung,
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    began_s = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    os.utime(tmp_path / "smoke-sft-20260101-030405-process1.log", (began_s - 9, began_s - 9))
    lines = child.failure("sft", 1, {"log": str(tmp_path / "smoke-sft-20260102-030405.log")}).splitlines()
    named = f"where a process hung: {tmp_path / 'smoke-sft-20260102-030406-process1.log'}"
    assert [line for line in lines if line.startswith("where")] == [named]


def test_a_job_that_was_cancelled_before_it_had_a_log_says_so_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = {"status": 2, "message": "job 7 ended as CANCELLED", "log": str(tmp_path / "ans-sft-7.log")}
    monkeypatch.setattr(child, "run_noted", lambda *_, **__: (1, noted))
    with pytest.raises(child.SettingsError, match="job 7 ended as CANCELLED"):
        child.repro("sft", root=tmp_path, timeout_s=1, extra_environment={})
