"""torch.compile for the layers of a language model, whose graphs are of no length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.fx.experimental._config as shapes
from torch import nn

from ans_core.model.checkpointing import layers_of

MULTIPLE = 64
"""Compiled layers read rows and branches whose lengths are multiples of this: a GPU's kernels want even
sizes, and the sizes 0 and 1, for which a compiler makes code of its own, never come up."""
BACKEND = "inductor"
"""torch's own. "aot_eager" traces the same graphs, forward and backward, and runs them operation by
operation; "eager" traces forward alone."""
LIMIT = 64
"""Graphs of the layers, from which on torch would run new kinds of batches uncompiled without a word; a run
needs a fraction of it (`train.watch.MOST_GRAPHS`)."""


@functools.cache
def _compiled_call(backend: str) -> Callable[..., Any]:
    """Compile the call of a layer, any layer: all share its graphs."""
    return torch.compile(nn.Module._call_impl, dynamic=True, backend=backend)


@functools.cache
def compiled_function(function: Callable[..., Any], *, on: bool) -> Callable[..., Any]:
    """Compile a function of tensors of any size, or (`on` false) return it."""
    return torch.compile(function, dynamic=True, backend=BACKEND) if on else function


@contextmanager
def compiled(stack: nn.Module, *, on: bool, each: Sequence[Mapping[str, Any]] = ()) -> Iterator[None]:
    """Run the layers of one of transformers' models compiled in the context, if `on`. `each`: arguments that
    a layer gets beside those of its call, for each layer.

    Every size of a batch is dynamic and all layers share their graphs, so there are a few for a run, however
    long its rows are: for one row and for several, with and without gradients, for each adapter. Only in the
    context, so that what reads a prompt into a KV cache never meets them. Results are those of eager layers
    but for rounding.
    """
    if not on and not each:
        yield
        return
    layers = layers_of(stack)
    call = _compiled_call(BACKEND) if on else nn.Module._call_impl
    for layer, arguments in zip(layers, each or [{}] * len(layers), strict=True):
        layer._compiled_call_impl = functools.partial(call, layer, **arguments)
    try:
        with _settings() if on else nullcontext():
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


@contextmanager
def _settings() -> Iterator[None]:
    """Two lengths that happen to be equal are still two sizes: else a graph would be made whenever they are
    not. Floats (LoRA's scaling, epsilons, dropout) are constants: else each is a tensor on the CPU, and a
    GPU's compiler builds C++ for them, for a minute."""
    constants = torch._dynamo.config.patch(recompile_limit=LIMIT, specialize_float=True)
    with constants, shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield
