"""Activations by formula (ans_core/model/footprint.py) against measured peaks, at small sizes on a CPU: a
Markdown table.

    python perf/activations.py

Every line is a process of its own: the loss of one micro-batch forward and backward, and the most bytes of
tensors that it made and that lived at once, the gradients included. They are counted as 4 bytes for each
trained weight. What an allocator rounds up or can't reuse comes on top.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

from ans_core.model import adapters
from ans_core.model.footprint import MicroBatch, activation_bytes
from ans_core.model.packing import Packed
from ans_core.model.supervised import Supervised
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from perf.training_peak import LiveBytes
from tests.tiny import GROUNDING, TEXTS

RANK = 16
SHAPES = ((256, 704, 4), (256, 704, 12), (512, 1408, 8))
"""Hidden and inner width, layers."""
BATCHES = ((2, 1024), (1, 2048))
"""Rows, tokens."""


def measure(
    hidden: int, inner: int, layers: int, rows: int, tokens: int, checkpointing: str
) -> tuple[float, float]:
    """Return (formula, measured) in MB."""
    tokenizer = build_tokenizer(TEXTS * 5, vocabulary=300)
    config = tiny_config(
        vision={"image_size": 16, "patch_size": 8, "hidden": 32, "layers": 1, "heads": 2, "mlp": 64},
        language={"hidden": hidden, "layers": layers, "heads": hidden // 64, "kv_heads": hidden // 128, "mlp": inner},
        grounding=GROUNDING,
        tokenizer=tokenizer,
        template="qwen_chat",
        video_frames=2,
    )  # fmt: skip
    model = build_tiny(config, tokenizer, seed=0)
    adapters.prepare_sft(model, adapters.lora_config(rank=RANK, alpha=16, dropout=0.0), seed=0)
    model.checkpointing = {"none": 0, "half": layers // 2, "layers": None}[checkpointing]
    module = Supervised(model, mask_weight=0.0, dice_weight=0.0, points=1)
    branch = torch.ones(rows, tokens, dtype=torch.long)
    branch[:, : tokens // 2] = 0
    ids = torch.randint(5, 100, branch.shape)
    packed = Packed(
        input_ids=ids, position_ids=torch.arange(tokens).expand_as(ids), branch=branch, loss_mask=branch > 0
    )

    def step(tokens: int) -> None:
        part = Packed(
            **{
                n: getattr(packed, n)[:, :tokens]
                for n in ("input_ids", "position_ids", "branch", "loss_mask")
            }
        )
        states = model.hidden_states(part, [None] * rows)
        learned = part.loss_mask.nonzero(as_tuple=True)
        module.text_loss(states[learned], part.input_ids[learned]).backward()
        model.zero_grad()

    step(tokens // 2 + 8)  # what libraries set up at their first call
    with LiveBytes() as live:
        step(tokens)
    batch = MicroBatch(rows=rows, tokens=tokens, learned=tokens // 2, masks=0)
    kept = activation_bytes(
        model, batch, rank=RANK, dropout=False, half=False, recomputed=model.checkpointing
    )
    gradients = 4 * sum(p.numel() for p in model.vlm.parameters() if p.requires_grad)
    return (kept["layers"] + kept["gradients"] + kept["logits"] + gradients) / 1e6, live.most / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("one", nargs="*", help=argparse.SUPPRESS)
    one = parser.parse_args().one
    if one:
        torch.set_num_threads(1)
        print(*measure(*map(int, one[:5]), one[5]))
        sys.exit()
    print(
        "| hidden, inner, layers | rows x tokens | checkpointing | formula, MB | measured, MB | formula / "
        "measured |\n|-|-|-|-|-|-|"
    )
    for shape in SHAPES:
        for batch in BATCHES:
            for checkpointing in ("none", "half", "layers"):
                words = [str(n) for n in (*shape, *batch)] + [checkpointing]
                done = subprocess.run(
                    [sys.executable, "-m", "perf.activations", *words],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                formula, found = map(float, done.stdout.split())
                sizes = ", ".join(map(str, shape))
                print(
                    f"| {sizes} | {batch[0]} x {batch[1]} | {checkpointing} | {formula:.0f} | {found:.0f} "
                    f"| {formula / found:.2f} |",
                    flush=True,
                )
