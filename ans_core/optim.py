"""AdamW over the trainable parameters, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn


def adamw(module: nn.Module, *, lr: float, weight_decay: float, scales: Mapping[str, float]) -> torch.optim.AdamW:
    """Make the optimizer of all parameters that require a gradient; norms, biases and embeddings are decayed too, as upstream does.

    `scales`: part of a name -> factor on the learning rate of the parameters whose names contain it.

    Raises ValueError if a trained tensor is not fp32: bf16 AdamW at lr 1e-5 moves hardly any weight.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            if p.dtype != torch.float32:
                raise ValueError(f"{name} is trained in {p.dtype}; cast it to float32 (autocast keeps the compute in bf16)")
            scale = next((factor for part, factor in scales.items() if part in name), 1.0)
            groups.setdefault(scale, []).append(p)
    if not groups:
        raise ValueError("nothing to train: no parameter requires a gradient")
    listed = [{"params": parameters, "scale": scale} for scale, parameters in groups.items()]
    return torch.optim.AdamW(listed, lr=lr, betas=(0.9, 0.999), weight_decay=weight_decay)


def lr_factor(step: int, *, steps: int, warmup: float) -> float:
    """Return the learning rate's factor: linear warm-up over the first share `warmup` of the steps, then cosine to 0. It depends on the
    step alone, so there is nothing to save."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
