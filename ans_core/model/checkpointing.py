"""Gradient checkpointing: layers keep their inputs alone and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ans_core.config.training import Checkpointing

LOGITS = 2**26
"""Logits that are held at once: 256 MB in fp32. Those of 8,192 tokens over 152,000 words would take 5 GB,
several times over."""

again: Any = partial(checkpoint, use_reentrant=False)


def layers_of(stack: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of one of transformers' models, in order."""
    return [m for m in stack.modules() if isinstance(m, GradientCheckpointingLayer)]


def layers_again(checkpointing: Checkpointing) -> int | None:
    """Return how many layers a setting has computed again (None: all)."""
    return None if checkpointing == "layers" else 0


@contextmanager
def checkpointed(stack: nn.Module, *, layers: int | None) -> Iterator[None]:
    """Checkpoint the first `layers` layers (None: all) of one of transformers' models in the context, where a
    gradient is wanted.

    The first ones, since by the time they are computed again, what the others kept has been let go. Only in
    the context, so that what reads with a KV cache (sampling, generation), which checkpointing would drop,
    never meets it. Layers are marked as training because transformers checkpoints no others, and all of them,
    for compiled ones to share their graphs; their dropouts are modules of their own and stay as they are.
    """
    every = layers_of(stack) if layers != 0 and torch.is_grad_enabled() else []
    before = [layer.training for layer in every]
    for layer in every:
        layer.training = True
    for layer in every[:layers]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = again
    try:
        yield
    finally:
        for layer, training in zip(every, before, strict=True):
            layer.gradient_checkpointing, layer.training = False, training


def in_pieces(function: Callable[..., tuple[Tensor, ...]], *rows: Tensor, words: int) -> tuple[Tensor, ...]:
    """Return `function(*rows)`, which makes `words` logits of every row.

    More than LOGITS of them are made piece by piece, and again in the backward pass; the pieces' results are
    concatenated. What the function counts is then counted twice.
    """
    count = max(1, LOGITS // words)
    if len(rows[0]) <= count:
        return function(*rows)
    outputs = [
        again(function, *pieces) for pieces in zip(*(tensor.split(count) for tensor in rows), strict=True)
    ]
    return tuple(torch.cat(results) for results in zip(*outputs, strict=True))
