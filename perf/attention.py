"""Long packed rows with and without a dense mask on a CPU: memory and seconds of one micro-batch, forward and
backward.

    python perf/attention.py [--tokens 2048 4096 8192]

Two rows: a prefix of five eighths (pictures) and three questions of an eighth each. Text model of width 256,
4 heads, 2 layers, LoRA, fp32. Every line is a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

from ans_core.model import adapters
from ans_core.model.packing import Packed
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from perf.peak import watched
from tests.tiny import GROUNDING, TEXTS

ROWS = 2


def measure(kind: str, tokens: int) -> tuple[float, float]:
    """Return (MB above the model's own memory, seconds)."""
    words = build_tokenizer(TEXTS * 5, vocabulary=300)
    config = tiny_config(
        vision={"image_size": 16, "patch_size": 8, "hidden": 32, "layers": 1, "heads": 2, "mlp": 64},
        language={"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 704},
        grounding=GROUNDING,
        tokenizer=words,
        template="qwen_chat",
        video_frames=2,
    )
    model = build_tiny(config, words, seed=0)
    if kind == "dense":
        model.internvl.set_attn_implementation("sdpa")
    adapters.prepare_sft(model, adapters.lora_config(rank=16, alpha=16, dropout=0.0), seed=0)

    def step(length: int) -> None:
        part = length // 8
        branch = torch.tensor([[0] * 5 * part + [1] * part + [2] * part + [3] * part] * ROWS)
        ids = torch.randint(5, 100, branch.shape, generator=torch.Generator().manual_seed(0))
        packed = Packed(
            input_ids=ids,
            position_ids=torch.arange(length).expand_as(ids),
            branch=branch,
            loss_mask=branch > 0,
        )
        hidden = model.hidden_states(packed, [None] * ROWS)
        hidden.square().mean().backward()
        model.zero_grad()

    step(256)
    with watched() as peak:
        began = time.process_time()
        step(tokens)
        took = time.process_time() - began
    return peak.grown / 1e6, took


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(1)
        print(*measure(arguments.one, arguments.tokens[0]))
        sys.exit()
    print("| tokens x rows | dense mask | branch by branch |\n|---|---|---|")
    for tokens in arguments.tokens:
        cells = []
        for kind in ("dense", "branches"):
            words = [sys.executable, "-m", "perf.attention", "--tokens", str(tokens), "--one", kind]
            grown, took = map(
                float, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
            )
            cells.append(f"{grown:,.0f} MB, {took:.1f} s of one core")
        print(f"| {tokens:,} x {ROWS} | {' | '.join(cells)} |", flush=True)
