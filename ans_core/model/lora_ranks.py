"""What full fine-tuning changed in every linear layer -> the LoRA rank that each of them needs."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ans_core.model.adapters import LORA_TARGETS
from ans_core.train import sharding

SMALLEST, LARGEST = 4, 128


def rank_of(change: Float[Tensor, "O I"], *, energy: float) -> int:
    """Return how many singular values hold the share `energy` of the sum of their squares, between SMALLEST
    and LARGEST."""
    wide = change.double() if change.shape[0] <= change.shape[1] else change.T.double()
    # of the singular values, largest first
    squares = torch.linalg.eigvalsh(wide @ wide.T).flip(0).clamp(min=0)
    held = squares.cumsum(0)
    count = int((held < energy * held[-1]).sum()) + 1
    return min(max(count, SMALLEST), LARGEST)


def rank_pattern(base: nn.Module, tuned: Mapping[str, Tensor], *, energy: float) -> dict[str, int]:
    """Return name -> rank of every linear layer that LoRA trains. `tuned`: the weights after full
    fine-tuning, by their names in `base`. Raises ValueError where they are another model's, and where none of
    them has changed."""
    linears = [
        n for n, m in base.named_modules() if isinstance(m, nn.Linear) and re.fullmatch(LORA_TARGETS, n)
    ]
    parameters = dict(base.named_parameters())
    ranks, changed = {}, False
    for name in linears:
        weight, mine = tuned.get(f"{name}.weight"), sharding.read(parameters[f"{name}.weight"])
        if weight is None or weight.shape != mine.shape:
            raise ValueError(f"lora_ranks_from is another model: it has no {name} of {tuple(mine.shape)}")
        change = weight.detach().float() - mine.float().to(weight.device)
        ranks[name], changed = rank_of(change, energy=energy), changed or bool(change.any())
    if not changed:
        raise ValueError(
            "lora_ranks_from has the base's own layers, so nothing says which ranks they need; name a full "
            "fine-tuning of it"
        )
    return ranks
