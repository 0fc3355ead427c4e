"""What bf16 costs and saves on this processor, operation by operation: a Markdown table.

    python perf/precision.py [--repeats 10]

Forward and backward pass, sizes of `tiny`, one thread, milliseconds, best of the repeats, in turns. Attention
in bf16: by PyTorch's fused kernel, by that kernel in fp32, and as `ans_core/precision.py` does it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ans_core import precision
from ans_core.precision import FEW

WAYS = ("fp32", "PyTorch's", "fused in fp32", "ours")


def operations() -> dict[str, tuple[Callable[[Tensor, str], Tensor], Tensor]]:
    """Return name -> (operation, its fp32 input), as a model's layers would call it."""
    linear, conv = nn.Linear(128, 384), nn.Conv2d(64, 64, 3, padding=1)

    def attention(x: Tensor, way: str, mask: Tensor | None = None) -> Tensor:
        half = x if way == "fp32" else x.bfloat16()  # as a linear layer gives it
        with torch.autocast("cpu", enabled=way not in ("fp32", "PyTorch's"), dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(half, half, half, attn_mask=mask)

    causal = torch.ones(16, 1, 328, 328, dtype=torch.bool).tril()
    return {
        "linear 4608 x 128 -> 384": (lambda x, way: linear(x), torch.randn(4608, 128)),
        "attention 32 x 4 heads x 144 x 32": (attention, torch.randn(32, 4, 144, 32)),
        "attention 16 x 4 heads x 328 x 40, masked": (
            partial(attention, mask=causal),
            torch.randn(16, 4, 328, 40),
        ),
        "attention 8 x 4 heads x 900 x 40": (attention, torch.randn(8, 4, 900, 40)),
        "convolution 16 x 64 x 32 x 32, 3 x 3": (lambda x, way: conv(x), torch.randn(16, 64, 32, 32)),
    }


def seconds(operation: Callable[[Tensor, str], Tensor], x: Tensor, way: str) -> float:
    precision.FEW = FEW if way == "ours" else 0
    x = x.detach().requires_grad_()
    start = time.perf_counter()
    with precision.autocast(x.device, torch.float32 if way == "fp32" else torch.bfloat16):
        out = operation(x, way)
    out.backward(torch.ones_like(out))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| operation | " + " | ".join(WAYS) + " |\n|" + "-|" * (len(WAYS) + 1))
    for name, (operation, x) in operations().items():
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(repeats + 2):
            for way in WAYS:
                found[way].append(seconds(operation, x, way))
        print(
            f"| {name} | " + " | ".join(f"{1000 * min(found[way][2:]):.1f}" for way in WAYS) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
