"""SFT on unlike rows: several processes and micro-batches must give the gradient of one process with all the
rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.workspace import launch

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from accelerate.state import AcceleratorState
from ans_core import dist
from ans_core.train import loop, sharding
from ans_core.checkpoints import checkpoint
from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.model import adapters
from ans_core.model.supervised import Supervised
from tests import tiny

box = (tiny.square(8, 8, 24, 24),)
segment = Turn(question="Please segment the red square in this image.", answer="It is [SEG].", masks=(box,))
both = Turn(question="Please segment the red square.", answer="It is [SEG] left of [SEG].", masks=((tiny.square(30, 30, 50, 60),), box))
describe = Turn(question="Describe region1.", answer="a small green square left of a blue square.", regions=(tiny.square(0, 0, 40, 40),))
short = Turn(question="Describe region1.", answer="a red circle.", regions=box)
# Rows 0 and 2 draw, 1 and 3 only describe: of two processes, or micro-batches, one has all the masks.
rows = [tiny.row(*turns, number=i, seed=i) for i, turns in enumerate([(segment,), (describe, short), (both, segment), (short,)])]

def sgd(module, *, lr, weight_decay, scales, muon_lr, fused):
    return torch.optim.SGD([{"params": [p for p in module.parameters() if p.requires_grad], "scale": 1.0}], lr=lr)

loop.states.Writer.save = lambda *args, **options: None  # states are AdamW's
loop.optimizer_of = sgd  # its step is the gradient itself; AdamW's hardly depends on the gradient's size

def train(folder, stage, accumulate):
    model = tiny.build()
    if stage == 3:  # loaded in parts: no process ever holds all layers
        if dist.rank() == 0:
            checkpoint.save(model, folder / "base", metadata={})
        held = []
        def divide(layer):
            sharding.divide(layer)
            held.append(sum(p.numel() for p in layer.parameters()))
        while not (folder / "base" / "manifest.json").exists():
            time.sleep(0.1)
        model = checkpoint.load(folder / "base", divide=divide)
        assert held == [0] * 4, held  # two of the language model, two of the vision tower
    adapters.prepare_sft(model, adapters.lora_config(rank=4, alpha=8, dropout=0.0), seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))

    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def make(step, micro):
        share = rows[micro * dist.world_size() + dist.rank() :: accumulate * dist.world_size()]
        return collate(share, model.tokenizer, tiny.layout(model))

    machine = loop.Machine(device=torch.device("cpu"), deepspeed_stage=stage)
    schedule = loop.Schedule(steps=1, lr=1.0, weight_decay=0.0, warmup=0.0, clip_grad=1e9, accumulate=accumulate, save_every=10)
    curves = loop.train(Supervised(model, mask_weight=2.0, dice_weight=0.5, points=64), make, name="t", schedule=schedule, machine=machine,
                        seed=0, scratch=folder, log=lambda m, s: None)
    moved = {n: sharding.read(p) - before[n] for n, p in model.named_parameters() if n in before}
    if dist.rank() == 0:
        facts = {n: [v for _, m, v in curves if m == n] for n in ("loss", "grad_norm")}
        torch.save({"moved": moved, **facts}, folder / "result.pt")

for number, (stage, accumulate) in enumerate(json.loads(sys.argv[2])):
    train(Path(sys.argv[1], str(number)), stage, accumulate)
    AcceleratorState._reset_state()  # accelerate takes one configuration of DeepSpeed a process
"""


def run(
    folder: Path, cases: Sequence[tuple[int, int]], *, processes: int
) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Train one step for each (ZeRO stage, micro-batches), all in the same processes."""
    for number in range(len(cases)):
        (folder / str(number)).mkdir(parents=True)
    script = folder / "sft.py"
    script.write_text(SCRIPT)
    launch(script, str(folder), json.dumps(cases), processes=processes)
    return [torch.load(folder / str(number) / "result.pt") for number in range(len(cases))]


@pytest.mark.slow
def test_parts_of_a_step_have_the_gradient_of_the_whole(tmp_path: Path) -> None:
    whole, *found = run(tmp_path / "one", [(0, 1), (0, 2)], processes=1)
    for part in (
        "lora_A",
        "embed_tokens",
        "lm_head",
        "projector",
        "text_hidden_fcs",
        "sam_mask_decoder.transformer",
    ):
        assert any(values.abs().max() > 0 for name, values in whole["moved"].items() if part in name), part
    cases = [(0, 1), (2, 1), (2, 2), (3, 1)]
    found += run(tmp_path / "two", cases, processes=2)
    for parts, case in zip(
        found,
        [
            "one process, two micro-batches",
            *(f"two processes, ZeRO {s}, {n} micro-batches" for s, n in cases),
        ],
        strict=True,
    ):
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5), case
        assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5), case
        for name, values in whole["moved"].items():
            assert (parts["moved"][name] - values).norm() <= 1e-5 * values.norm() + 1e-6, f"{case}: {name}"
