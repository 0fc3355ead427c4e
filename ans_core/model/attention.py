"""Attention of packed rows (packing.py) in memory that grows with their length, not with its square.

Short batches keep the dense mask. Long ones go without: on a GPU as a block mask of torch's FlexAttention, elsewhere branch by branch with
scaled_dot_product_attention. transformers' models find all three under one name, beside their own "sdpa" and "eager".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ans_core.model.packing import branch_attention

NAME = "branches"
"""transformers' name of this attention. With masks of any other kind it is "sdpa", bit for bit."""

DENSE = 2**24
"""Elements of a batch's dense mask up to which it is used (16 MB; its copy in fp32, made in every layer, takes four times as much): one row
of 4,096 tokens or 16 of 1,024. Below, splitting a row costs more time than it saves (docs/full-size.md)."""


def use_branches(language_model: nn.Module) -> None:
    """Let a text model of transformers read what `packed_mask` returns."""
    config: Any = language_model.config
    config._attn_implementation = NAME


def packed_mask(language_model: nn.Module, branch: Int[Tensor, "B L"]) -> Any:
    """Return the `attention_mask` of a packed batch for this model: (B, 1, L, L), a block mask, or the branches' numbers (B, 1, 1, L)."""
    config: Any = language_model.config
    rows, length = branch.shape
    if config._attn_implementation == "eager":  # adds its mask to the scores
        return torch.zeros(rows, 1, length, length, device=branch.device).masked_fill(~branch_attention(branch)[:, None], -torch.inf)
    if config._attn_implementation != NAME or rows * length**2 <= DENSE:
        return branch_attention(branch)[:, None]
    if branch.device.type == "cuda":
        return block_mask(branch)
    return branch[:, None, None]


def block_mask(branch: Int[Tensor, "B L"]) -> BlockMask:
    """Return `branch_attention` as blocks: those that nothing in them may attend to are skipped."""
    rows, length = branch.shape
    # A lambda: FlexAttention counts the arguments, which a function checked by beartype hides.
    allowed: Any = lambda row, head, query, key: (  # noqa: E731
        (query == key) | ((key <= query) & (branch[row, query] >= 0) & ((branch[row, key] == 0) | (branch[row, key] == branch[row, query])))
    )
    return create_block_mask(allowed, rows, None, length, length, device=branch.device.type, _compile=branch.is_cuda)


def attend(
    module: nn.Module,
    query: Float[Tensor, "B H Q d"],
    key: Float[Tensor, "B K L d"],
    value: Float[Tensor, "B K L d"],
    attention_mask: Tensor | BlockMask | None,
    **options: Any,
) -> tuple[Float[Tensor, "B Q H d"], Tensor | None]:
    """Compute one layer's attention, by the kind of its mask. The signature is transformers'."""
    if isinstance(attention_mask, BlockMask):
        return flex_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is None or attention_mask.is_floating_point() or attention_mask.dtype == torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    settings = {"scale": options.get("scaling"), "dropout_p": options.get("dropout", 0.0)}
    rows = zip(query, key, value, attention_mask[:, 0, 0], strict=True)
    return torch.stack([_by_branch(q, k, v, branch, **settings) for q, k, v, branch in rows]).transpose(1, 2).contiguous(), None


def _by_branch(
    query: Float[Tensor, "H L d"], key: Float[Tensor, "K L d"], value: Float[Tensor, "K L d"], branch: Int[Tensor, " L"], **settings: Any
) -> Float[Tensor, "H L d"]:
    """Compute one row. The prefix and the first branch together are plainly causal; only the branches after them need a mask. Padding gets
    zeros."""
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
    length = int((branch >= 0).sum())
    later = torch.nonzero(branch > max(1, int(branch[0])))
    begun = int(later[0]) if len(later) else length
    found = [_attention(query[:, :begun], key[:, :begun], value[:, :begun], is_causal=True, **settings)]
    if begun < length:
        allowed = branch_attention(branch[None, :length], first=begun)[0]
        found.append(_attention(query[:, begun:length], key[:, :length], value[:, :length], attn_mask=allowed, **settings))
    return torch.cat([*found, torch.zeros_like(query[:, length:])], dim=1)


def _attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query[None], key[None], value[None], **options)[0]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
