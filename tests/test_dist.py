"""What processes share."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from ans_core import dist
from tests.workspace import launch

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from ans_core import dist
torch.distributed.init_process_group("gloo")
mean = dist.shared_mean(1.0 + 4 * dist.rank(), torch.device("cpu"))
means = dist.shared_means([{"both": 2.0 * dist.rank(), f"rank {dist.rank()}": 7.0}])
turns = dist.by_turns("abcde", 2, lambda some: [f"{one} of {some} by {dist.rank()}" for one in some])
Path(sys.argv[1], str(dist.rank())).write_text(json.dumps([mean, means, turns, dist.by_turns("", 2, list)]))
torch.distributed.destroy_process_group()
"""


SLOW = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch
from ans_core import dist
torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=2))
dist.after_the_first(lambda: time.sleep(4))
if dist.rank() == 1:
    time.sleep(4)
dist.wait_for_all()
Path(sys.argv[1], str(dist.rank())).touch()
torch.distributed.destroy_process_group()
"""


def test_one_process_alone_gets_its_value_back() -> None:
    assert dist.shared_mean(0.3, torch.device("cpu")) == 0.3
    assert dist.shared_means([{"loss": 0.3, "iou": 0.5}, {"loss": 0.5}]) == {"loss": 0.4, "iou": 0.5}
    assert dist.by_turns("abc", 2, lambda some: [one + some for one in some]) == ["aab", "bab", "cc"]


@pytest.mark.slow
def test_two_processes_get_the_same_mean_and_all_that_either_makes(tmp_path: Path) -> None:
    script = tmp_path / "mean.py"
    script.write_text(SCRIPT)
    launch(script, str(tmp_path))
    for rank in "01":  # a name that one process alone has is its own value
        assert json.loads((tmp_path / rank).read_text()) == [
            3.0,
            {"both": 1.0, "rank 0": 7.0, "rank 1": 7.0},
            ["a of ab by 0", "b of ab by 0", "c of cd by 1", "d of cd by 1", "e of e by 0"],
            [],
        ]


@pytest.mark.slow
def test_processes_wait_for_each_other_longer_than_their_group_would(tmp_path: Path) -> None:
    """NCCL's groups end a run after ten minutes, less than a large state may take to write."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    launch(script, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_an_order_has_each_element_once_and_depends_on_the_seed_alone(count: int) -> None:
    order = [dist.permuted(place, count, 3, "epoch") for place in range(count)]
    assert sorted(order) == list(range(count))
    assert order == [dist.permuted(place, count, 3, "epoch") for place in range(count)]
    if count >= 64:
        assert (
            order != list(range(count)) != [dist.permuted(place, count, 4, "epoch") for place in range(count)]
        )


@pytest.mark.slow
def test_all_orders_are_equally_likely() -> None:
    """4! orders of 12,000 seeds: chi-squared with 23 degrees of freedom is over 49.7 once in a thousand times."""
    seen = Counter(tuple(dist.permuted(place, 4, seed) for place in range(4)) for seed in range(12_000))
    assert len(seen) == 24
    assert sum((count - 500) ** 2 / 500 for count in seen.values()) < 49.7


def test_neighbours_of_a_large_order_are_as_far_apart_as_of_a_shuffle() -> None:
    """Two uniform numbers below n are n / 3 apart in the mean, with a standard deviation of n / 18 ** .5."""
    count = 100_000_000
    order = np.array([dist.permuted(count // 2 + i, count, 0) for i in range(3000)])
    gaps = np.abs(np.diff(order)) / count
    assert abs(gaps.mean() - 1 / 3) < 4 / (18 * len(gaps)) ** 0.5
    assert len(set(order.tolist())) == len(order)


def test_epochs_follow_each_other_in_orders_of_their_own() -> None:
    numbers = [dist.in_epochs(number, 9, 1) for number in range(27)]
    epochs = [numbers[:9], numbers[9:18], numbers[18:]]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
