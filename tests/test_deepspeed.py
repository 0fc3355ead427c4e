"""The loop on two processes with DeepSpeed ZeRO-2 (gloo, CPU) against one plain process."""

import json
from pathlib import Path

import pytest

from tests.workspace import launch

SCRIPT = """
import json, sys
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
from ans_core import dist, loop

@dataclass
class Batch:
    x: torch.Tensor
    def to(self, device):
        return self

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
    def forward(self, batch):
        loss = (self.body(self.frozen(batch.x)) - batch.x).pow(2).mean()
        return loss, {}

def make(step, micro):
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    mine = rows[micro * dist.world_size() + dist.rank() :: 2 * dist.world_size()]
    return Batch(mine)

module = Regression()
machine = loop.Machine(device=torch.device("cpu"), deepspeed_stage=int(sys.argv[2]))
schedule = loop.Schedule(steps=6, lr=0.05, weight_decay=0.0, warmup=0.0, clip_grad=0.1, accumulate=2, save_every=2)
curves = loop.train(module, make, name="t", schedule=schedule, machine=machine, seed=0, scratch=Path(sys.argv[1]), log=lambda m, s: None)
if dist.rank() == 0:
    norms = [v for s, n, v in curves if n == "grad_norm"]
    losses = [v for s, n, v in curves if n == "loss"]
    result = {"w": module.body.weight.detach().flatten().tolist(), "norms": norms, "losses": losses}
    Path(sys.argv[1], "result.json").write_text(json.dumps(result))
"""


def run(folder: Path, script: Path, *, processes: int, stage: int) -> dict[str, list[float]]:
    folder.mkdir()
    launch(script, str(folder), str(stage), processes=processes)
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_two_processes_with_zero_2_train_as_one_process_does(tmp_path: Path) -> None:
    script = tmp_path / "regression.py"
    script.write_text(SCRIPT)
    one = run(tmp_path / "one", script, processes=1, stage=0)
    two = run(tmp_path / "two", script, processes=2, stage=2)
    assert two["w"] == pytest.approx(one["w"], abs=1e-5)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)  # of all processes, not the first one's
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-3)
