"""What the stage `memory` trained -> into the base, and into what SFT writes, so that later stages need the
base and SFT's folder alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ans_core.checkpoints import checkpoint
from ans_core.model.network import Network

DECODER, ORIGINAL = "sam2.sam_mask_decoder.", "sam2.original_mask_decoder."
"""Our names of SAM2's mask decoder after and before Sa2VA's training."""
PREFIX = "memory/"
"""Prefix of these tensors in SFT's delta, where a trained mask decoder has a tensor of the same name."""


def load_into(model: Network, folder: Path, *, base: Path) -> dict[str, Tensor]:
    """Copy the tensors of the stage's output into a base model and return them; none if the stage passed the
    base through. A mask decoder becomes the original one, too. Raises ValueError if the output belongs to
    another base."""
    tensors, _ = checkpoint.load_delta(folder, base_hash=checkpoint.weights_hash(base))
    put(model, tensors)
    return tensors


def put(model: Network, tensors: Mapping[str, Tensor]) -> None:
    """Copy SAM2's tensors into a model."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
            if name.startswith(DECODER) and model.sam2.config.original_decoder:
                parameters[name.replace(DECODER, ORIGINAL)].copy_(tensor)


def joined(tensors: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put these tensors beside those that SFT trained."""
    return {PREFIX + name: tensor for name, tensor in tensors.items()} | dict(trained)


def taken(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Divide SFT's delta into the tensors of the stage `memory` and its own."""
    first = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    return first, {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
