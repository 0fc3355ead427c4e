"""Counts what a CPU without bf16 instructions would have to emulate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "linear", "convolution", "convolution_backward")
HALF = (torch.bfloat16, torch.float16)


class HalfProducts(TorchDispatchMode):
    """Within it, `counts` has the matrix products, convolutions and attention kernels that read half
    precision, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_product = name in PRODUCTS or "attention" in name
        if is_product and any(isinstance(x, torch.Tensor) and x.dtype in HALF for x in args):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
