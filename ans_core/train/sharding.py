"""ZeRO-3: a model's layers divided among the processes while they are loaded, and parameters read and set as
wholes, one at a time.

A parameter that is not divided is read and set as it is, so callers need not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_divided(p: Tensor) -> bool:
    return hasattr(p, "ds_tensor")


@contextmanager
def _gathered(p: Any, *, change: bool) -> Iterator[None]:
    if not is_divided(p):
        yield
        return
    import deepspeed  # takes seconds, and ZeRO-3 alone needs it

    with deepspeed.zero.GatheredParameters([p], modifier_rank=0 if change else None):
        yield


def read(p: nn.Parameter) -> Tensor:
    """Return a parameter's values: itself without a graph, or a copy in main memory where it is divided. All
    processes must call it."""
    with _gathered(p, change=False):
        return p.detach().cpu().clone() if is_divided(p) else p.detach()


@torch.no_grad()
def write(p: nn.Parameter, values: Tensor) -> None:
    """Set a parameter; all processes must call it, with the same values."""
    with _gathered(p, change=True):
        p.copy_(values)


def divide(module: nn.Module) -> None:
    """Divide the module's parameters among the processes; each keeps its part alone. All processes must call
    it, with the same weights."""
    import deepspeed

    deepspeed.zero.Init(module=module)
