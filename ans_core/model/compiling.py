"""torch.compile for the layers of a language model, with lengths that no length is compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

MULTIPLE = 64
"""Compiled layers read rows and branches whose lengths are multiples of this: a GPU's kernels want even sizes, and the sizes 0 and 1, for
which a compiler makes code of its own, never come up."""
BACKEND = "inductor"
"""torch's own. "aot_eager" traces the same graphs, forward and backward, and runs them operation by operation."""

_compiled: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


@contextmanager
def compiled(stack: nn.Module, *, on: bool) -> Iterator[None]:
    """Run the layers of one of transformers' models compiled in the context.

    Every size of a batch is dynamic and all layers share their graphs, so there are a few for a run, however long its rows are: for one row
    and for several, with and without gradients. Only in the context, so that what reads with a KV cache (sampling, generation) never meets
    them. Results are those of eager layers but for rounding.
    """
    layers = [m for m in stack.modules() if isinstance(m, GradientCheckpointingLayer)] if on else []
    for layer in layers:
        if layer not in _compiled:
            _compiled[layer] = torch.compile(layer._call_impl, dynamic=True, backend=BACKEND)
        layer._compiled_call_impl = _compiled[layer]
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
