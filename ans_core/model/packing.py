"""Rows of one prefix and several branches -> who may look at whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of one prefix (the image) and its branches (questions with answers), each branch seeing the prefix and itself only.

    This equals separate rows that repeat the prefix, at a fraction of the tokens. `branch`: 0 in the prefix, 1..k, -1 in padding.
    """

    input_ids: Int[Tensor, "B L"]
    position_ids: Int[Tensor, "B L"]
    branch: Int[Tensor, "B L"]
    loss_mask: Bool[Tensor, "B L"]
    """True where the token is to be learned (as a target)."""
    regions: list[list[Bool[Tensor, "grid grid"]]] = field(default_factory=list)
    """Visual prompts of every row, in the order of their `<vp>` tokens."""
    clips: list[bool] = field(default_factory=list)
    """Which rows show a clip: its visual prompts are of the first frame. Empty = none."""


def branch_attention(branch: Int[Tensor, "B L"]) -> Bool[Tensor, "B L L"]:
    """May query q look at key k: k not after q, and k in the prefix or in q's own branch. Padding looks at itself only."""
    query, key = branch[:, :, None], branch[:, None, :]
    causal = torch.ones(branch.shape[1], branch.shape[1], dtype=torch.bool, device=branch.device).tril()
    allowed = causal & ((key == 0) | (key == query)) & (key >= 0)
    return torch.where(query >= 0, allowed, torch.eye(branch.shape[1], dtype=torch.bool, device=branch.device))
