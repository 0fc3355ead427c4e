"""One function on many items side by side."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import psutil
import pytest

from ans_core.data.parallel import in_order
from tasks.ports import free_port
from tests import forks
from tests.job_workspace import until
from tests.workspace import LIMIT_S, ROOT, launch

SHARED = """
import json, os, sys
from pathlib import Path
from ans_core import dist
from ans_core.data import parallel
from tests.data import test_parallel


def first() -> tuple[list[int], int]:
    made = [list(parallel.in_order(test_parallel.halved, range(0, 2 * n, 2), many=1, what="n")) for n in (0, 2, 7)]
    made.append(list(parallel.in_order(test_parallel.parent, range(4), many=2, what="n")))
    return made, dist.world_size()


if __name__ == "__main__":  # processes of a pool import this file
    with dist.process_group():
        if sys.argv[2] == "well":
            made = parallel.led_by_the_first(first)
            Path(sys.argv[1], str(dist.rank())).write_text(json.dumps(made))
        else:
            work = getattr(test_parallel, sys.argv[2])
            parallel.led_by_the_first(lambda: list(parallel.in_order(work, [2, 3, 4, 4, 4, 4, 4, 4], many=1, what="n")))
"""


def halved(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def parent(number: int) -> int:
    return os.getppid()


def ended(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_results_come_in_order_and_an_error_in_its_items_turn() -> None:
    begun = []

    def work(number: int) -> int:
        begun.append(number)
        return halved(number)

    assert list(in_order(halved, range(0, 100, 2), many=100, what="numbers")) == list(range(50))
    assert list(in_order(halved, [], many=1, what="numbers")) == []
    results = in_order(work, [*range(0, 200, 2), 1], many=1000, what="numbers", most=4)
    assert list(islice(results, 3)) == [0, 1, 2]
    assert len(begun) <= 3 + 6  # little is made before its turn
    with pytest.raises(ValueError, match="1 is odd"):
        list(results)


@pytest.mark.slow
def test_a_killed_process_is_told_with_what_it_read() -> None:
    with pytest.raises(
        RuntimeError, match=r"shards/train: one of . processes that read it was killed, .* memory"
    ):
        list(in_order(ended, range(8), many=1, what="shards/train"))


ELSEWHERE = """
from ans_core.data import parallel, pictures

if __name__ == "__main__":
    print(list(parallel.in_order(pictures._decode, [[]] * 3, many=1, what="n")))
"""


@pytest.mark.slow
def test_processes_import_what_their_starter_imports_and_no_file_of_the_folder_it_is_in(
    tmp_path: Path,
) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user/tqdm.py").write_text("raise RuntimeError('of the user')")
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    ended = subprocess.run(
        [sys.executable, script], cwd=tmp_path / "user", capture_output=True, text=True, check=False
    )
    assert ended.stdout == "[[], [], []]\n", ended.stderr


KILLED = """
import os, signal
from ans_core.data import parallel
from tests.data import test_parallel

if __name__ == "__main__":
    results = parallel.in_order(test_parallel.named, range(9), many=1, what="n")
    print(next(results), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def named(number: int) -> int:
    return os.getpid()


@pytest.mark.slow
def test_the_processes_of_a_killed_one_end(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    (killed,) = forks.run(script)
    assert killed.status == -signal.SIGKILL
    until(lambda: not psutil.pid_exists(int(killed.said.split()[0])), "a process outlives the pool's owner")


@pytest.mark.slow
def test_processes_of_several_nodes_share_the_items_of_the_first(tmp_path: Path) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    launch(script, str(tmp_path), "well", processes=3)
    made, others = json.loads((tmp_path / "0").read_text())
    *results, pools = made
    assert results == [list(range(count)) for count in (0, 2, 7)]
    assert len({*pools[:3]}) == 3
    assert pools[0] == pools[3]
    assert others == 1  # the first one is alone in all else
    assert [(tmp_path / rank).read_text() for rank in "12"] == ["null", "null"]


def gone(number: int) -> int:
    """Kill the second process, the parent of this one's pool."""
    owner = multiprocessing.parent_process()
    if os.environ.get("RANK") == "1" and owner and owner.pid:
        os.kill(owner.pid, signal.SIGKILL)
    return number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ("halved", "ValueError: 3 is odd"),
        ("ended", "n: one of . processes that read it"),
    ],
)
def test_what_fails_on_another_node_is_told_by_the_first(tmp_path: Path, work: str, reason: str) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    first, second = forks.run(script, str(tmp_path), work, processes=2)
    assert first.status == 1
    assert re.search(reason, first.said)
    assert "Error" not in second.said


@pytest.mark.slow
def test_a_node_that_is_lost_is_named(tmp_path: Path) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [
        subprocess.Popen(
            [sys.executable, script, tmp_path, "gone"],
            env={**os.environ, **place, "RANK": rank, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    errors = [process.communicate(timeout=LIMIT_S)[1] for process in both]
    assert [process.returncode for process in both] == [1, -signal.SIGKILL]
    assert "RuntimeError: n: process 1, which shares it, is gone" in errors[0]
