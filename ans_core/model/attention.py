"""Attention of packed rows (packing.py): branches don't pay for each other's tokens, nor long rows for the
square of their length.

Short batches have a dense mask. Long ones go without, each branch read after its prefix by
scaled_dot_product_attention; so do short ones where it halves the scores. No size is compiled for, so rows of
unlike lengths cost nothing but themselves. transformers' models find both under one name, beside their own
"sdpa" and "eager".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ans_core.data.branches import BranchPlaces
from ans_core.model.packing import branch_attention

NAME = "branches"
"""transformers' name of this attention. With masks of any other kind it is "sdpa", bit for bit."""

DENSE = 2**24
"""Elements of a mask up to which one is made (16 MB; its copy in fp32, made in every layer, takes four times
as much): one row of 4,096 tokens or 16 of 1,024."""


def use_branches(language_model: nn.Module) -> None:
    """Let a text model of transformers read what `attention_of` returns."""
    config: Any = language_model.config
    config._attn_implementation = NAME


def attention_of(
    language_model: nn.Module, branch: Int[Tensor, "B L"], places: BranchPlaces, *, dense: bool | None = None
) -> dict[str, Any]:
    """Return how this model attends in a packed batch, as arguments of its call: a dense `attention_mask` (B,
    1, L, L), or the branches' `places` with a mask (B, 1, 1, L) that says which tokens there are. `dense`:
    None = the cheaper one."""
    config: Any = language_model.config
    rows, length = branch.shape
    if config._attn_implementation == "eager":  # adds its mask to the scores
        allowed = branch_attention(branch)[:, None]
        return {
            "attention_mask": torch.zeros(allowed.shape, device=branch.device).masked_fill(
                ~allowed, -torch.inf
            )
        }
    if dense is None:
        # a GPU's causal kernel leaves out what is masked
        scores = places.scores // 2 if branch.is_cuda else places.scores
        dense = rows * length**2 <= DENSE and 2 * scores > rows * length**2
    if dense or config._attn_implementation != NAME:
        return {"attention_mask": branch_attention(branch)[:, None]}
    return {"attention_mask": (branch >= 0)[:, None, None], "places": places}


def attend(
    module: nn.Module,
    query: Float[Tensor, "B H Q d"],
    key: Float[Tensor, "B K L d"],
    value: Float[Tensor, "B K L d"],
    attention_mask: Tensor | None,
    places: BranchPlaces | None = None,
    memory: Memory | None = None,
    count: Int[Tensor, " 1"] | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B Q H d"], Tensor | None]:
    """Compute one layer's attention. The signature is transformers'; `places`: of rows that are read branch
    by branch; `memory`: what the layer has read before the one token of each row, number `count` of its
    answer."""
    # rotated in the residual stream's fp32: autocast would cast what is copied from them, and no kernel
    # shares fp32 keys
    if query.is_cuda:
        query, key = query.to(value.dtype), key.to(value.dtype)
    if memory is not None:
        assert attention_mask is not None, "the prompt's mask"
        assert count is not None, "the token's number"
        return next_token(query, key, value, memory, attention_mask, count, scale=options["scaling"]), None
    if places is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return by_branch(
        query, key, value, places, scale=options.get("scaling"), dropout_p=options.get("dropout", 0.0)
    ), None


Memory = tuple[
    Float[Tensor, "B K P d"], Float[Tensor, "B K P d"], Float[Tensor, "R K A d"], Float[Tensor, "R K A d"]
]
"""One layer's keys and values of B prompts, which R / B answers share, then room for those of the R
answers."""


def next_token(
    query: Float[Tensor, "R H 1 d"],
    key: Float[Tensor, "R K 1 d"],
    value: Float[Tensor, "R K 1 d"],
    memory: Memory,
    prompt: Bool[Tensor, "B 1 1 P"],
    count: Int[Tensor, " 1"],
    *,
    scale: float,
) -> Float[Tensor, "R 1 H d"]:
    """Write one token's key and value in their place, and attend to the prompt and to the answer so far.

    A prompt is read once for all its answers, and for all heads that share its keys; no attention kernel does
    that. Scores are fp32. `prompt`: the places that hold a token.
    """
    prompt_keys, prompt_values, keys, values = memory
    keys.index_copy_(2, count, key.to(keys.dtype))
    values.index_copy_(2, count, value.to(values.dtype))
    (prompts, shared, width, _), (rows, heads, _, size) = prompt_keys.shape, query.shape
    answers, groups, room = rows // prompts, heads // shared, keys.shape[2]
    query = query.to(keys.dtype).view(prompts, answers, shared, groups, size)
    with torch.autocast(query.device.type, enabled=False):
        # scores of shape (B, K, R/B, H/K, P) and (B, K, R/B, H/K, A)
        by_prompt = query.transpose(1, 2).reshape(prompts * shared, answers * groups, size)
        to_prompt = _scores(by_prompt, prompt_keys.flatten(0, 1), scale).view(
            prompts, shared, answers, groups, width
        )
        to_answer = _scores(query.reshape(rows * shared, groups, size), keys.flatten(0, 1), scale)
        to_answer = to_answer.view(prompts, answers, shared, groups, room).transpose(1, 2)
        written = torch.arange(room, device=count.device) <= count
        scores = [
            to_prompt.masked_fill(~prompt[:, :, None], -torch.inf),
            to_answer.masked_fill(~written, -torch.inf),
        ]
        weights = torch.cat(scores, dim=-1).softmax(-1).to(values.dtype)
        of_prompt, of_answer = weights.split([width, room], dim=-1)
        # both sums are fp32, of shape (R, K, H/K, d)
        from_prompt = _product(
            of_prompt.reshape(prompts * shared, answers * groups, width), prompt_values.flatten(0, 1)
        )
        from_prompt = from_prompt.view(prompts, shared, answers, groups, size).transpose(1, 2)
        from_answer = _product(
            of_answer.transpose(1, 2).reshape(rows * shared, groups, room), values.flatten(0, 1)
        )
        attended = from_prompt + from_answer.view_as(from_prompt)
        return attended.to(values.dtype).reshape(rows, 1, heads, size)


def _scores(
    query: Float[Tensor, "N M d"], key: Float[Tensor, "N T d"], scale: float
) -> Float[Tensor, "N M T"]:
    """Return scaled products in fp32; on a CPU, where `precision` computes attention in bf16, with its
    rounding."""
    if query.is_cuda:
        return _product(query, key.transpose(1, 2)) * scale
    return ((query * scale) @ key.transpose(1, 2)).float()


def _product(left: Float[Tensor, "N M T"], right: Float[Tensor, "N T d"]) -> Float[Tensor, "N M d"]:
    """Return the product in fp32, of half precision too."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def by_branch(
    query: Float[Tensor, "B H L d"],
    key: Float[Tensor, "B K L d"],
    value: Float[Tensor, "B K L d"],
    places: BranchPlaces,
    **settings: Any,
) -> Float[Tensor, "B L H d"]:
    """Read the rows of a batch together: what comes before their second branches is plainly causal, and every
    later branch is a row of its own, with the prefix before it. Padding gets zeros."""
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (B*L, H or K, d)
    packed = query.is_cuda or torch.compiler.is_compiling()  # eager results on a CPU stay, to the bit
    # flash attention reads shared keys; in fp32 there is none
    gqa = packed and groups > 1 and query.dtype != torch.float32

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (B, H or K, J, d)
        if not gqa:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=gqa, **settings
        )
        return attended.transpose(1, 2)  # (B, J, H, d)

    def after_prefix(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (N, H, Q, d), (N, K, P+Q, d)
        if not packed:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=allowed[:, None], **settings
            ).transpose(1, 2)
        # The heads that share keys are rows of one query, so that the prefix is not copied for each of them.
        query = query.unflatten(1, (-1, groups)).flatten(2, 3)  # (N, K, groups*Q, d)
        allowed = allowed[:, None].repeat(1, 1, groups, 1)  # (N, 1, groups*Q, P+Q)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, **settings)
        return attended.unflatten(2, (groups, -1)).flatten(1, 2).transpose(1, 2)  # (N, Q, H, d)

    outputs = [causal(*(x[places.first.clamp(min=0)] for x in flat)).flatten(0, 1)]
    prefixes = [x[places.prefix.clamp(min=0)] for x in flat[1:]]  # (B, P, K, d)
    for rows, later in _some_at_once(places):
        queries, *keys_values = (x[later.clamp(min=0)] for x in flat)
        # keys and values have the shape n, P+Q, K, d
        keys = [torch.cat([prefix[rows], x], dim=1) for prefix, x in zip(prefixes, keys_values, strict=True)]
        there = torch.cat([places.prefix[rows] >= 0, later >= 0], dim=1)
        allowed = there[:, None] & later.new_ones(later.shape[1], keys[0].shape[1], dtype=torch.bool).tril(
            places.prefix.shape[1]
        )
        allowed |= (later < 0)[:, :, None]  # what is read by nobody must not be NaN
        outputs.append(after_prefix(queries, keys[0], keys[1], allowed).flatten(0, 1))
    outputs.append(outputs[0].new_zeros(1, *outputs[0].shape[1:]))
    return torch.cat(outputs)[places.back].unflatten(0, (batch, length))


def _some_at_once(places: BranchPlaces) -> list[tuple[Tensor, Tensor]]:
    """Return (rows, places) of later branches, so many that their mask has at most DENSE elements. Compiled
    code takes all of them, whose mask is then one layer's at a time: how many parts there are would be a
    graph each."""
    if torch.compiler.is_compiling():
        return [(places.rows, places.later)]
    count, longest = places.later.shape
    most = max(1, DENSE // max(1, longest * (longest + places.prefix.shape[1])))
    return list(zip(places.rows.split(most), places.later.split(most), strict=True)) if count else []


# on Hopper it comes first, and plans each new length for a second or two
torch.backends.cuda.enable_cudnn_sdp(False)
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
