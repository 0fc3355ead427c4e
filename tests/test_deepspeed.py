"""The loop on two processes with DeepSpeed ZeRO-2 and ZeRO-3 (gloo, CPU) against one plain process."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.workspace import launch

SCRIPT = """
import json, math, sys
from dataclasses import dataclass
from pathlib import Path
import torch
from accelerate.state import AcceleratorState
from torch import nn
from ans_core import dist, loop, sharding
from ans_core.watch import Watch

@dataclass
class Batch:
    x: torch.Tensor
    factor: float = 1.0
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
        return loss * batch.factor, {}

def make(step, micro):
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    mine = rows[micro * dist.world_size() + dist.rank() :: 2 * dist.world_size()]
    bad = step == 3 and micro == 0 and dist.rank() == dist.world_size() - 1  # on one process alone
    return Batch(mine, math.nan if bad else 1.0)

def train(folder, stage):
    module = Regression()
    machine = loop.Machine(device=torch.device("cpu"), deepspeed_stage=stage)
    schedule = loop.Schedule(steps=6, lr=0.05, weight_decay=0.0, warmup=0.0, clip_grad=0.1, accumulate=2, save_every=2)
    watch = Watch(rows=lambda step: [f"row of {dist.rank()}"])
    given = dict(name="t", schedule=schedule, machine=machine, seed=0, scratch=folder, log=lambda m, s: None, watch=watch)
    curves = loop.train(module, make, **given)
    weight = sharding.read(module.body.weight)
    if dist.rank() == 0:
        norms = [v for s, n, v in curves if n == "grad_norm" and s != 3]
        losses = [v for s, n, v in curves if n == "loss" and s != 3]
        skipped = [s for s, n, v in curves if n == "skipped" and v]
        result = {"w": weight.flatten().tolist(), "norms": norms, "losses": losses, "skipped": skipped}
        (folder / "result.json").write_text(json.dumps(result))

for stage in map(int, sys.argv[2:]):
    train(Path(sys.argv[1], str(stage)), stage)
    AcceleratorState._reset_state()  # accelerate takes one configuration of DeepSpeed a process
"""


def run(folder: Path, script: Path, *, processes: int, stages: Sequence[int]) -> list[dict[str, list[float]]]:
    for stage in stages:
        (folder / str(stage)).mkdir(parents=True)
    launch(script, str(folder), *map(str, stages), processes=processes)
    return [json.loads((folder / str(stage) / "result.json").read_text()) for stage in stages]


@pytest.mark.slow
def test_two_processes_with_zero_2_and_3_train_and_skip_as_one_process_does(tmp_path: Path) -> None:
    """At step 3 the loss of one micro-batch, of one of the processes, is no number: all of them skip the step."""
    script = tmp_path / "regression.py"
    script.write_text(SCRIPT)
    (one,) = run(tmp_path / "one", script, processes=1, stages=[0])
    for stage, two in zip((2, 3), run(tmp_path / "two", script, processes=2, stages=[2, 3]), strict=True):
        assert two["w"] == pytest.approx(one["w"], abs=1e-5)
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)  # of all processes, not the first one's
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-3)
        assert two["skipped"] == one["skipped"] == [3]
        for rank in (0, 1):
            line = json.loads((tmp_path / f"two/{stage}/t/skipped-{rank}.jsonl").read_text())
            assert (line["step"], line["rows"]) == (3, [f"row of {rank}"])
