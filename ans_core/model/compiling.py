"""torch.compile for the layers of a language model, whose graphs are of no length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.experimental._config as shapes
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

MULTIPLE = 64
"""Compiled layers read rows and branches whose lengths are multiples of this: a GPU's kernels want even sizes, and the sizes 0 and 1, for
which a compiler makes code of its own, never come up."""
BACKEND = "inductor"
"""torch's own. "aot_eager" traces the same graphs, forward and backward, and runs them operation by operation."""
LIMIT = 64
"""Graphs of the layers, from which on torch would run new kinds of batches uncompiled without a word; a run needs a fraction of it
(`train.watch.MOST_GRAPHS`)."""


@functools.cache
def _compiled_call(backend: str) -> Callable[..., Any]:
    """Compile the call of a layer, any layer: all share its graphs."""
    return torch.compile(nn.Module._call_impl, dynamic=True, backend=backend)


@contextmanager
def compiled(stack: nn.Module, *, on: bool) -> Iterator[None]:
    """Run the layers of one of transformers' models compiled in the context.

    Every size of a batch is dynamic and all layers share their graphs, so there are a few for a run, however long its rows are: for one row
    and for several, with and without gradients, for each adapter. Only in the context, so that what reads with a KV cache (sampling,
    generation) never meets them. Results are those of eager layers but for rounding.
    """
    if not on:
        yield
        return
    layers = [m for m in stack.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer._compiled_call_impl = functools.partial(_compiled_call(BACKEND), layer)
    try:
        # Two lengths that happen to be equal are still two sizes: else a graph would be made whenever they are not.
        with torch._dynamo.config.patch(recompile_limit=LIMIT), shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
