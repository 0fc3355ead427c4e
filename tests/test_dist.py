"""What processes share."""

from pathlib import Path

import pytest
import torch

from ans_core import dist
from tests.workspace import launch

SCRIPT = """
import sys
from pathlib import Path
import torch
from ans_core import dist
torch.distributed.init_process_group("gloo")
Path(sys.argv[1], str(dist.rank())).write_text(str(dist.shared_mean(1.0 + 4 * dist.rank(), torch.device("cpu"))))
torch.distributed.destroy_process_group()
"""


def test_one_process_alone_gets_its_value_back() -> None:
    assert dist.shared_mean(0.3, torch.device("cpu")) == 0.3


@pytest.mark.slow
def test_two_processes_get_the_same_mean(tmp_path: Path) -> None:
    script = tmp_path / "mean.py"
    script.write_text(SCRIPT)
    launch(script, str(tmp_path))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3.0", "3.0"]
