"""The optimizer of the trainable parameters, AdamW or Muon beside it, and the learning rate of every step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

IN_STACK = re.compile(r"\.\d+\.")
"""In the name of a parameter of a layer among several in a row."""


class Together(Optimizer):
    """Several optimizers, each with parameters of its own, as one: its groups are theirs."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]  # loading has made new ones


def optimizer_of(module: nn.Module, *, lr: float, weight_decay: float, scales: Mapping[str, float], muon_lr: float = 0.0) -> Optimizer:
    """Make the optimizer of all parameters that require a gradient: AdamW; norms, biases and embeddings are decayed too, as upstream does.

    `muon_lr`: not 0 = Muon for the matrices of stacked layers (a number in the name, as in `layers.3.`), its update scaled to the size of
    AdamW's (Jordan et al. 2024; Liu et al. 2025). `scales`: part of a name -> factor on the learning rate of the parameters whose names
    contain it.

    Raises ValueError if a trained tensor is not fp32: bf16 AdamW at lr 1e-5 moves hardly any weight.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, p in module.named_parameters():
        if p.requires_grad:
            if p.dtype != torch.float32:
                raise ValueError(f"{name} is trained in {p.dtype}; cast it to float32 (autocast keeps the compute in bf16)")
            scale = next((factor for part, factor in scales.items() if part in name), 1.0)
            matrix = muon_lr > 0 and p.ndim == 2 and IN_STACK.search(name) is not None
            groups[matrix, scale * muon_lr / lr if matrix else scale].append(p)
    if not groups:
        raise ValueError("nothing to train: no parameter requires a gradient")
    matrices, others = ([{"params": ps, "scale": scale} for (m, scale), ps in groups.items() if m == chosen] for chosen in (True, False))
    parts: list[Optimizer] = [Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")] if matrices else []
    parts += [AdamW(others, lr=lr, betas=(0.9, 0.999), weight_decay=weight_decay)] if others else []
    return parts[0] if len(parts) == 1 else Together(parts)


def lr_factor(step: int, *, steps: int, warmup: float) -> float:
    """Return the learning rate's factor: linear warm-up over the first share `warmup` of the steps, then cosine to 0. It depends on the
    step alone, so there is nothing to save."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
