"""What bf16 costs and saves on this processor, operation by operation: a Markdown table.

    python perf/precision.py [--repeats 10]

Forward and backward pass, sizes of `tiny`, one thread, milliseconds, best of the repeats, in turns. `autocast` is PyTorch's, `ours` leaves
attention in fp32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ans_core import precision


def operations() -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Return name -> (operation, its fp32 input), under autocast as a model's layers would call it."""
    linear, conv = nn.Linear(128, 384), nn.Conv2d(64, 64, 3, padding=1)

    def attention(x: Tensor) -> Tensor:
        half = x.bfloat16() if torch.is_autocast_enabled("cpu") else x  # as a linear layer gives it
        return F.scaled_dot_product_attention(half, half, half)

    return {
        "linear 4608 x 128 -> 384": (linear, torch.randn(4608, 128)),
        "attention 32 x 4 heads x 144 x 32": (attention, torch.randn(32, 4, 144, 32)),
        "convolution 16 x 64 x 32 x 32, 3 x 3": (conv, torch.randn(16, 64, 32, 32)),
    }


def seconds(operation: Callable[[Tensor], Tensor], x: Tensor, *, half: bool, ours: bool) -> float:
    precision.CPU_ATTENTION = torch.float32 if ours else torch.bfloat16
    x = x.detach().requires_grad_()
    start = time.perf_counter()
    with precision.autocast(x.device, torch.bfloat16 if half else torch.float32):
        out = operation(x)
    out.float().sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ways = {"fp32": {"half": False, "ours": True}, "autocast": {"half": True, "ours": False}, "ours": {"half": True, "ours": True}}
    print("| operation | " + " | ".join(ways) + " |\n|" + "-|" * (len(ways) + 1))
    for name, (operation, x) in operations().items():
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats + 2):
            for way, options in ways.items():
                found[way].append(seconds(operation, x, **options))
        print(f"| {name} | " + " | ".join(f"{1000 * min(found[way][2:]):.1f}" for way in ways) + " |", flush=True)


if __name__ == "__main__":
    main()
