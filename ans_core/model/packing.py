"""Rows of one prefix and several branches -> their attention mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ans_core.data.branches import BranchPlaces
from ans_core.data.tensor_batch import TensorBatch


@dataclass(frozen=True, kw_only=True)
class Packed(TensorBatch):
    """Rows of one prefix (the image) and its branches (questions with answers). A branch attends to the
    prefix and to itself only.

    This equals separate rows that repeat the prefix, with a fraction of the tokens. `branch` is 0 in the
    prefix, 1..k in branches, -1 in padding.
    """

    ON_HOST = frozenset({"regions"})

    input_ids: Int[Tensor, "B L"]
    position_ids: Int[Tensor, "B L"]
    """A token's number in its conversation: the prefix, then its branch."""
    branch: Int[Tensor, "B L"]
    loss_mask: Bool[Tensor, "B L"]
    """True where the token is a target of the loss."""
    regions: list[list[Bool[Tensor, "h w"]]] = field(default_factory=list)
    """Visual prompts of each row, in the order of their `<vp>` tokens."""
    places: BranchPlaces | None = None
    """Of `branch`, if they were counted before the batch went to a GPU, which would wait for it."""
    slots: tuple[int, ...] | None = None
    """Image tokens of every row, likewise."""


def branch_attention(branch: Int[Tensor, "B L"]) -> Bool[Tensor, "B L L"]:
    """Say whether query q may attend to key k: k is not after q and lies in the prefix or in q's branch.
    Padding attends to itself only."""
    query, key = branch[:, :, None], branch[:, None, :]
    length = branch.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=branch.device).tril()
    allowed = causal & ((key == 0) | (key == query)) & (key >= 0)
    return torch.where(query >= 0, allowed, torch.eye(length, dtype=torch.bool, device=branch.device))
