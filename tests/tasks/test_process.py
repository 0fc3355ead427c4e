import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.process import held
from tasks.tracking import flat, metric_name, works_since

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
