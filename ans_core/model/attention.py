"""Attention of packed rows (packing.py): branches don't pay for each other's tokens, nor long rows for the square of their length.

Short batches have a dense mask. Long ones go without: on a GPU as a block mask of torch's FlexAttention, elsewhere with each branch read
after its prefix by scaled_dot_product_attention, which short ones do, too, where it halves the scores. transformers' models find all three
under one name, beside their own "sdpa" and "eager".
"""

from __future__ import annotations

from dataclasses import dataclass
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
"""Elements of a mask up to which one is made (16 MB; its copy in fp32, made in every layer, takes four times as much): one row of 4,096
tokens or 16 of 1,024."""


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
    if config._attn_implementation != NAME:
        return branch_attention(branch)[:, None]
    on_gpu, dense = branch.device.type == "cuda", rows * length**2
    if dense <= DENSE and (on_gpu or 2 * _places(branch).scores > dense):
        return branch_attention(branch)[:, None]
    return block_mask(branch) if on_gpu else branch[:, None, None]


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
    return _by_branch(query, key, value, attention_mask[:, 0, 0], **settings), None


def _by_branch(
    query: Float[Tensor, "B H L d"],
    key: Float[Tensor, "B K L d"],
    value: Float[Tensor, "B K L d"],
    branch: Int[Tensor, "B L"],
    **settings: Any,
) -> Float[Tensor, "B L H d"]:
    """Compute the rows of a batch together: what comes before their second branches is plainly causal, and every later branch is a row of
    its own, with the prefix before it. Padding gets zeros."""
    places = _places(branch)
    groups = query.shape[1] // key.shape[1]
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (B*L, H, d)

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (N, H, Q, d)
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, **options, **settings).transpose(1, 2)  # (N, Q, H, d)

    begun = attention(*(x[places.begun.clamp(min=0)] for x in flat), is_causal=True)
    found, where = [begun[places.begun >= 0]], [places.begun[places.begun >= 0]]
    prefixes = [x[places.prefix.clamp(min=0)] for x in flat[1:]]  # (B, P, K, d)
    most = max(1, DENSE // max(1, places.later.shape[1] * (places.later.shape[1] + places.prefix.shape[1])))
    for rows, later in zip(places.rows.split(most), places.later.split(most), strict=True) if len(places.rows) else ():
        queries, *own = (x[later.clamp(min=0)] for x in flat)
        keys = [torch.cat([prefix[rows], x], dim=1) for prefix, x in zip(prefixes, own, strict=True)]
        known = torch.cat([places.prefix[rows] >= 0, later >= 0], dim=1)
        allowed = known[:, None] & later.new_ones(later.shape[1], keys[0].shape[1], dtype=torch.bool).tril(places.prefix.shape[1])
        allowed |= (later < 0)[:, :, None]  # what is read by nobody must not be NaN
        found.append(attention(queries, *keys, attn_mask=allowed[:, None])[later >= 0])
        where.append(later[later >= 0])
    out = torch.zeros_like(flat[0], dtype=begun.dtype).index_copy(0, torch.cat(where), torch.cat(found))
    return out.unflatten(0, branch.shape)


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where tokens stand in the flattened batch; -1: nothing."""

    begun: Int[Tensor, "B J"]
    """Of every row the prefix and the first branch."""
    prefix: Int[Tensor, "B P"]
    later: Int[Tensor, "N Q"]
    """Every branch after a row's first one."""
    rows: Int[Tensor, " N"]
    """Its row."""

    @property
    def scores(self) -> int:
        """Return how many scores are computed, those of padding included."""
        (rows, begun), (branches, later), prefix = self.begun.shape, self.later.shape, self.prefix.shape[1]
        return rows * begun**2 + branches * later * (prefix + later)


def _places(branch: Int[Tensor, "B L"]) -> _Places:
    """Find the parts of rows: prefix, branches one after another, padding."""
    count, length = branch.shape
    runs, lengths = torch.unique_consecutive(
        (torch.arange(count, device=branch.device)[:, None] * (length + 2) + branch + 1).flatten(), return_counts=True
    )
    rows, numbers, starts = runs // (length + 2), runs % (length + 2) - 1, lengths.cumsum(0) - lengths
    said = numbers > 0
    later = said & torch.cat([said.new_zeros(1), said[:-1] & (rows[1:] == rows[:-1])])
    begun = lengths.new_zeros(count).index_add(0, rows[(numbers >= 0) & ~later], lengths[(numbers >= 0) & ~later])
    prefix = lengths.new_zeros(count).index_add(0, rows[numbers == 0], lengths[numbers == 0])
    first = torch.arange(count, device=branch.device) * length
    return _Places(begun=_spans(first, begun), prefix=_spans(first, prefix), later=_spans(starts[later], lengths[later]), rows=rows[later])


def _spans(starts: Int[Tensor, " N"], lengths: Int[Tensor, " N"]) -> Int[Tensor, "N M"]:
    """Count on from every start, -1 after its length."""
    offsets = torch.arange(int(lengths.max()) if len(lengths) else 0, device=starts.device)
    return torch.where(offsets < lengths[:, None], starts[:, None] + offsets, -1)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
