"""What processes share."""

import os
import subprocess
import sys

import pytest
import torch

from ans_core import dist

SCRIPT = """
import torch
from ans_core import dist
torch.distributed.init_process_group("gloo")
print("MEAN", dist.rank(), dist.shared_mean(1.0 + 4 * dist.rank(), torch.device("cpu")), flush=True)
torch.distributed.destroy_process_group()
"""


def test_one_process_alone_gets_its_value_back() -> None:
    assert dist.shared_mean(0.3, torch.device("cpu")) == 0.3


@pytest.mark.slow
def test_two_processes_get_the_same_mean(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "mean.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("MEAN")) == ["MEAN 0 3.0", "MEAN 1 3.0"]
