"""A step of SFT waits for its GPU once: on a CPU, what would wait is counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ans_core.data.collate import Batch, collate
from ans_core.data.conversation import Turn
from ans_core.model import adapters
from ans_core.model.parts import part_of
from ans_core.model.supervised import Supervised
from ans_core.train import loop
from ans_core.train.watch import Watch
from tests import tiny
from tests.device_reads import DeviceReads

HOST = ("data/", "pictures/", "train/watch.py")
"""Where batches are made, before they go to the GPU, and where what was read is written down."""


@pytest.mark.slow
def test_a_step_reads_its_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = (tiny.square(8, 8, 24, 24),)
    segment = Turn(
        question="Please segment the red square in this image.", answer="It is [SEG].", masks=(box,)
    )
    both = Turn(
        question="Please segment it.",
        answer="It is [SEG] left of [SEG].",
        masks=((tiny.square(30, 30, 50, 60),), box),
    )
    describe = Turn(
        question="Describe region1.", answer="a small green square.", regions=(tiny.square(0, 0, 40, 40),)
    )
    rows = [
        tiny.row(*turns, number=number, seed=number)
        for number, turns in enumerate([(segment,), (describe, both)])
    ]
    model = tiny.build()
    adapters.prepare_sft(model, adapters.lora_config(rank=4, alpha=8, dropout=0.0), seed=0)
    steps: list[Counter[str]] = []
    together: list[int] = []
    one_step, read = loop._Run.update, loop.read_together

    def counted(*args: Any) -> Any:
        with DeviceReads() as reads:
            found = one_step(*args)
        steps.append(
            Counter({line: count for line, count in reads.places.items() if not line.startswith(HOST)})
        )
        return found

    def counted_read(values: Any) -> Any:
        together.append(len(values))
        return read(values)

    def make(step: int, micro: int) -> Batch:
        return collate(rows, model.tokenizer, tiny.layout(model))

    monkeypatch.setattr(loop._Run, "update", counted)
    monkeypatch.setattr(loop, "read_together", counted_read)
    # its step counts are on the CPU on every machine
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    module = Supervised(model, mask_weight=2.0, dice_weight=0.5, points=64, object_weight=0.5)
    schedule = loop.Schedule(
        steps=2, lr=1e-3, weight_decay=0.0, warmup=0.0, clip_grad=1.0, accumulate=3, save_every=2
    )
    curves = loop.train(
        module, make, name="sft", schedule=schedule, machine=loop.Machine(device=torch.device("cpu")), seed=0,
        scratch=tmp_path, log=lambda metrics, step: None,
        watch=Watch(part_of=part_of),
    )  # fmt: skip
    assert {"loss", "text", "bce", "dice", "mask_iou", "object", "grad_norm"} <= {
        name for _, name, _ in curves
    }
    regions = {"backbones/base.py"}  # their masks are on the CPU
    waits = [
        {line: count for line, count in step.items() if line.partition(":")[0] not in regions}
        for step in steps
    ]
    assert waits == [{}, {}]
    assert together == [4, 4]  # losses of three micro-batches and the norms, read at once
