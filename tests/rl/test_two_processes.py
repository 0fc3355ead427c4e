"""RL on two processes (gloo, CPU), plain and with ZeRO-2, against one: the same rollouts, the same loss, the
same policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.workspace import launch

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
import torch
from accelerate.state import AcceleratorState
from ans_core import dist
from ans_core.train import loop
from ans_core.rl import dual_loop
from ans_core.rl.dual_loop import LOOPS, Batches
from ans_core.rl.rollout import SampledAnswer
from ans_core.rl.batch import rl_batch
from ans_core.rl import refer_loop
from ans_core.rl.validation import HeldOutRewards
from ans_core.dist import own_share
from tests import tiny
from tests.rl.test_dual_loop import loops

samples = [tiny.region(i, text, masks=((tiny.square(4 * i, 8, 4 * i + 30, 40),),)) for i, text in enumerate(
    ("a red square", "a small green square", "a blue circle", "a square"))]
referring = [dataclasses.replace(sample, task="referring") for sample in samples]
rollouts = {}

def noting(name):
    act = LOOPS[name].act
    def noted(step):
        done = act(step)
        if step.settings.group == 1:  # a validation's
            return done
        for i, sample in enumerate(step.batch.samples):
            rows = slice(3 * i, 3 * i + 3)
            rollouts[f"{step.seeds} {sample.sample_id}"] = [done.texts[rows], [m["counts"] for m in done.masks[rows]]]
        return done
    return dataclasses.replace(LOOPS[name], act=noted)

sampled = refer_loop.sample_answers

def said(step, requests, what):
    # An untrained model draws nothing, so the loop refer is given its words.
    found = sampled(step, requests, what)
    ids = tuple(step.model.tokenizer.encode("It is [SEG].", add_special_tokens=False))
    return [SampledAnswer(ids=ids, logps=(0.0,) * len(ids), complete=True) for _ in found]

refer_loop.sample_answers = said
for name in ("caption", "mask", "refer"):
    LOOPS[name] = noting(name)

def train(folder, stage):
    rollouts.clear()
    module = loops(tiny.build(), scale_rewards="within", combine_rewards="normalise_then_sum", temperature=0.8,
                   loops={"caption": 1.0, "mask": 0.5, "refer": 1.0})

    def make(step, micro):
        own = own_share(list(range(4)), micro=micro, micros=1)
        batches = [rl_batch(part, [s.text for s in part], module.model, mask_size=32)
                   for part in ([some[i] for i in own] for some in (samples, referring))]
        of = {"caption": 0, "mask": 0, "refer": 1}
        return Batches(batches=batches, of=of, learned=len(own), rollout=step, micro=0, inner=0, step=step)

    machine = loop.Machine(device=torch.device("cpu"), deepspeed_stage=stage, dtype=sys.argv[3])
    schedule = loop.Schedule(steps=3, lr=2e-4, weight_decay=0.0, warmup=0.0, clip_grad=1.0, accumulate=1, save_every=10)
    curves = loop.train(module, make, name="rl", schedule=schedule, machine=machine, seed=0, scratch=folder,
                        log=lambda m, s: None, after_step=module.after_step)
    policy = {name: t.double().sum().item() for name, t in module.policies.tensors("policy").items()}
    # three samples, of which two processes take two and one
    held_out = HeldOutRewards(module, {"caption": samples[1:], "mask": samples[1:], "refer": referring[1:]},
                              batch=1, mask_size=32, autocast=machine.autocast())
    found = {"rollouts": rollouts, "held out": held_out.measure(),
             "loss": [v for s, n, v in curves if n == "loss"], "policy": policy, "width": module.exploration.width}
    (folder / f"{dist.rank()}.json").write_text(json.dumps(found))

for stage in map(int, sys.argv[2].split(",")):
    train(Path(sys.argv[1], str(stage)), stage)
    AcceleratorState._reset_state()  # accelerate takes one configuration of DeepSpeed a process
"""


def run(
    folder: Path, *, processes: int, stages: Sequence[int], dtype: str = "fp32"
) -> list[list[dict[str, Any]]]:
    """What each process found with each ZeRO stage."""
    for stage in stages:
        (folder / str(stage)).mkdir(parents=True)
    script = folder / "rl.py"
    script.write_text(SCRIPT)
    launch(script, str(folder), ",".join(map(str, stages)), dtype, processes=processes)
    return [
        [json.loads((folder / f"{stage}/{rank}.json").read_text()) for rank in range(processes)]
        for stage in stages
    ]


@pytest.mark.slow
def test_two_processes_roll_out_and_learn_as_one_does(tmp_path: Path) -> None:
    ((one,),) = run(tmp_path / "one", processes=1, stages=[0])
    for two in run(tmp_path / "two", processes=2, stages=[0, 2]):
        together = two[0]["rollouts"] | two[1]["rollouts"]
        assert together.keys() == one["rollouts"].keys()
        assert len(together) == 3 * 3 * 4
        assert together == one["rollouts"]
        assert two[0]["loss"] == two[1]["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two[0]["held out"] == two[1]["held out"] == pytest.approx(one["held out"], abs=1e-3)
        assert two[0]["width"] == two[1]["width"] == pytest.approx(one["width"])
        for name, total in one["policy"].items():
            assert two[0]["policy"][name] == two[1]["policy"][name] == pytest.approx(total, abs=1e-3), name


@pytest.mark.slow
def test_two_processes_learn_from_the_gradients_of_both_in_bf16(tmp_path: Path) -> None:
    """Rollouts hold LoRA in half precision; the hooks that average its gradients must outlive that."""
    for one, other in run(tmp_path, processes=2, stages=[0, 2], dtype="bf16"):
        assert one["policy"] == other["policy"]
        assert one["loss"] == other["loss"]


LOST = """
import sys
from pathlib import Path
import torch
from torch import nn
from ans_core import dist
from ans_core.train import loop

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
    def forward(self, batch):
        if sys.argv[2] == "lost":  # DistributedDataParallel's hook is on the gradient accumulator of fp32
            own = self.weight.data
            self.weight.data, self.weight.data = own.bfloat16(), own
        return (self.weight * batch).sum() ** 2, {}

loop.train(Line(), lambda step, micro: torch.ones(3) * (1 + dist.rank()), name="line",
           schedule=loop.Schedule(steps=1, lr=1e-3, weight_decay=0.0, warmup=0.0, clip_grad=9.0, accumulate=1, save_every=1),
           machine=loop.Machine(device=torch.device("cpu")), seed=0, scratch=Path(sys.argv[1]), log=lambda m, s: None)
"""


@pytest.mark.slow
def test_processes_that_do_not_share_their_gradients_are_stopped_at_the_first_state(tmp_path: Path) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    launch(script, str(tmp_path / "kept"), "kept", processes=2)
    with pytest.raises(AssertionError, match=r"line: at step 0 the gradient has norm .* don't share their"):
        launch(script, str(tmp_path / "lost"), "lost", processes=2)
