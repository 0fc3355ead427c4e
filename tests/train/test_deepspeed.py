"""The loop on two processes with DeepSpeed ZeRO-2 and ZeRO-3 (gloo, CPU) against one plain process."""

import json
import shutil
from dataclasses import dataclass
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
from ans_core import dist
from ans_core.train import loop, sharding
from ans_core.train.watch import Watch

@dataclass
class Batch:
    x: torch.Tensor
    factor: float = 1.0
    def to(self, device):
        return self

is_enabled = torch.is_autocast_enabled
torch.is_autocast_enabled = lambda kind="cpu": is_enabled(kind)  # by default it asks about GPUs, as DeepSpeed does

class Regression(nn.Module):
    dtype = None
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Linear(5, 5)
            self.head = nn.Linear(5, 5)
            self.frozen = nn.Linear(5, 5).requires_grad_(False)
    def forward(self, batch):
        output = self.head(self.body(self.frozen(batch.x)))
        self.dtype = str(output.dtype)
        return (output - batch.x).pow(2).mean() * batch.factor, {}

class Stop(Exception):
    pass

stop_at = None  # step

def make(step, micro):
    if step == stop_at:
        raise Stop
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    mine = rows[micro * dist.world_size() + dist.rank() :: 2 * dist.world_size()]
    bad = step == 3 and micro == 0 and dist.rank() == dist.world_size() - 1  # on one process alone
    return Batch(mine, math.nan if bad else 1.0)

def train(folder, stage, dtype):
    module = Regression()
    machine = loop.Machine(device=torch.device("cpu"), deepspeed_stage=stage, dtype=dtype)
    schedule = loop.Schedule(steps=6, lr=0.05, weight_decay=0.0, warmup=0.0, clip_grad=0.1, accumulate=2, save_every=2)
    watch = Watch(rows=lambda step: [f"row of {dist.rank()}"])
    given = dict(name="t", schedule=schedule, machine=machine, seed=0, scratch=folder, log=lambda m, s: None, watch=watch)
    curves = loop.train(module, make, scales={"head": 0.5}, **given)
    weight = torch.cat([sharding.read(layer.weight) for layer in (module.body, module.head)])
    if dist.rank() == 0:
        norms = [v for s, n, v in curves if n == "grad_norm" and s != 3]
        losses = [v for s, n, v in curves if n == "loss" and s != 3]
        skipped = [s for s, n, v in curves if n == "skipped" and v]
        result = {"w": weight.flatten().tolist(), "norms": norms, "losses": losses, "skipped": skipped, "dtype": module.dtype}
        (folder / "result.json").write_text(json.dumps(result))

for word in sys.argv[2:]:  # FOLDER=STAGE, or FOLDER=STAGE! to stop before step 5; `half...` in bf16
    name, stage = word.split("=")
    stop_at = 5 if stage.endswith("!") else None
    try:
        train(Path(sys.argv[1], name), int(stage.strip("!")), "bf16" if name.startswith("half") else "fp32")
    except Stop:
        pass
    dist.wait_for_all()
    AcceleratorState._reset_state()  # accelerate takes one configuration of DeepSpeed a process
"""


def run(folder: Path, script: Path, *words: str, processes: int) -> dict[str, dict[str, list[float]]]:
    """Train as the script's words say; the results by folder."""
    for word in words:
        (folder / word.split("=")[0]).mkdir(parents=True, exist_ok=True)
    launch(script, str(folder), *words, processes=processes)
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}


@dataclass(frozen=True)
class Runs:
    folder: Path
    script: Path
    results: dict[str, dict[str, list[float]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One plain process, two with each stage, and the same stopped before step 5 of 6."""
    folder = tmp_path_factory.mktemp("deepspeed")
    script = folder / "regression.py"
    script.write_text(SCRIPT)
    run(folder, script, "whole0=0", "cut0=0!", processes=1)
    return Runs(
        folder,
        script,
        run(folder, script, "whole2=2", "whole3=3", "cut2=2!", "cut3=3!", "half2=2", "half3=3", processes=2),
    )


def assert_close(one: dict[str, list[float]], other: dict[str, list[float]]) -> None:
    assert one["w"] == pytest.approx(other["w"], abs=1e-5)
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)  # of all processes, not the first one's
    assert one["norms"] == pytest.approx(other["norms"], rel=1e-3)
    assert one["skipped"] == other["skipped"] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_with_deepspeed_train_and_skip_as_one_process_does(runs: Runs, stage: int) -> None:
    """At step 3 the loss of one micro-batch, of one of the processes, is no number: all of them skip the
    step."""
    assert_close(runs.results[f"whole{stage}"], runs.results["whole0"])
    for rank in (0, 1):
        line = json.loads((runs.folder / f"whole{stage}/t/skipped-{rank}.jsonl").read_text())
        assert (line["step"], line["rows"]) == (3, [f"row of {rank}"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_leaves_the_precision_of_the_forward_pass_as_it_is(runs: Runs, stage: int) -> None:
    assert runs.results[f"half{stage}"]["dtype"] == "torch.bfloat16"
    assert runs.results[f"whole{stage}"]["dtype"] == "torch.float32"


@pytest.mark.slow
def test_a_run_with_deepspeed_goes_on_to_the_same_bits_and_on_other_processes_or_with_another_stage(
    runs: Runs,
) -> None:
    """The state has four steps, one of which was skipped, two learning rates, and 25 weights a layer that two
    processes can't divide evenly. `2on1`: begun with ZeRO-2 on two processes, ended by one without DeepSpeed; `3as2`: ended by two
    with ZeRO-2."""
    folder = runs.folder
    for name in ("2on1", "3on1", "3as2", "0as3"):
        shutil.copytree(folder / f"cut{name[0]}", folder / name)
    found = run(folder, runs.script, "cut2=2", "cut3=3", "3as2=2", "0as3=3", processes=2)
    found |= run(folder, runs.script, "2on1=0", "3on1=0", processes=1)
    assert (found["cut2"], found["cut3"]) == (runs.results["whole2"], runs.results["whole3"])
    for name in ("2on1", "3on1", "3as2", "0as3"):
        assert_close(found[name], runs.results["whole0"])
