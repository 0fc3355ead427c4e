import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.process import held
from tasks.tracking import StageRun, client, close_stuck_runs, experiment_id, find_runs, flat, metric_name, works_since

HOLD = """
import sys, time
from pathlib import Path
from tasks.process import held
with held(Path(sys.argv[1]), "first"):
    print("held", flush=True)
    time.sleep(60)
"""
ROOT = Path(__file__).resolve().parents[2]


def test_a_second_holder_is_refused_by_name_and_gets_the_lock_when_the_first_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, cwd=ROOT)
    assert first.stdout is not None
    assert first.stdout.readline() == b"held\n"
    with pytest.raises(SystemExit, match=rf"second can't start: first \(pid {first.pid}"), held(lock, "second", wait=False):
        pass
    first.kill()
    first.wait()
    start_s = time.monotonic()
    with held(lock, "second"):
        assert time.monotonic() - start_s < 5


def test_a_killed_process_that_nobody_waited_for_is_not_at_work() -> None:
    started_s = time.time()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert works_since(process.pid, time.time())
    assert not works_since(process.pid, started_s - 60)  # the number was another's then
    process.kill()
    deadline_s = time.monotonic() + 10
    while works_since(process.pid, time.time()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not works_since(process.pid, time.time())
    process.wait()
    assert not works_since(process.pid, time.time())


def test_mlflow_gets_names_it_allows() -> None:
    assert metric_name("video/val/J&F") == "video/val/J_F"
    assert metric_name("referring/val/gIoU") == "referring/val/gIoU"


def test_parameters_are_flattened_to_dotted_names() -> None:
    assert flat({"sft": {"optim": {"lr": 0.1}, "frames": 4}}) == {"sft.optim.lr": "0.1", "sft.frames": "4"}


TRACKED = """
import sys, time
from pathlib import Path
from tasks.process import exit_on_term
from tasks.tracking import start_tracker
exit_on_term()
with start_tracker() as tracker:
    run = tracker.stage_run(Path(sys.argv[1]), stage="sft", version="1", profile="tiny", state_key="k", params={"steps": 3})
    run.log({"loss": 0.5}, 7)
    try:
        print("running", flush=True)
        time.sleep(60)
    finally:
        run.end(ok=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_stage_logged_outlives_it_and_its_tracker_does_not(tmp_path: Path, way: signal.Signals) -> None:
    stage = subprocess.Popen([sys.executable, "-c", TRACKED, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    assert stage.stdout is not None
    assert stage.stdout.readline() == b"running\n"
    if way == signal.SIGTERM:
        os.killpg(stage.pid, way)
    else:
        stage.kill()
    stage.wait()
    deadline_s = time.monotonic() + 120
    while group_lives(stage.pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not group_lives(stage.pid)
    mlflow = client(tmp_path)
    (run,) = find_runs(mlflow, experiment_id(mlflow, tmp_path), {"ans.kind": "stage"})
    assert run.data.tags["ans.pid"] == str(stage.pid)
    assert run.data.params == {"steps": "3"}
    if way == signal.SIGTERM:
        assert (run.info.status, run.data.metrics) == ("FAILED", {"loss": 0.5})
    else:
        assert len(close_stuck_runs(tmp_path)) == 2  # the stage's and the pipeline's


@pytest.mark.slow
def test_metrics_wait_while_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow.exceptions import MlflowException

    run = StageRun(tmp_path, stage="sft", version="1", profile="tiny", state_key="k", params={}, pid=os.getpid())
    mlflow = client(tmp_path)
    away = True
    log_batch = run._mlflow.log_batch

    def sometimes(*words: Any, **named: Any) -> None:
        if away:
            raise MlflowException("connection refused\nand a page of SQL")
        log_batch(*words, **named)

    monkeypatch.setattr(run._mlflow, "log_batch", sometimes)
    for step in range(3):
        run.log({"loss": step / 2}, step)
    run.flush()
    assert capsys.readouterr().err == "MLflow takes no metrics at present, 3 wait: connection refused\n"
    away = False
    run.end(ok=True)
    assert [(found.step, found.value) for found in mlflow.get_metric_history(run.run_id, "loss")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
