"""What processes share."""

import json
from pathlib import Path

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
