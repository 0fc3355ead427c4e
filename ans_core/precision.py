"""The precision of forward passes: fp32, or bf16 by autocast.

On a CPU, autocast computes attention in its own way here. PyTorch's takes its fused kernel to bf16, where that costs 2 to 3 times as much,
backward pass included, while matrix products cost a quarter (`python perf/precision.py`). So attention is two matrix products in bf16 with
a softmax between them, as long as its scores are few, and the fused kernel in fp32 beyond.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 2**25
"""Scores that are kept for the backward pass at most: 64 MB in bf16."""
FUSED = torch.float32
"""Dtype of the fused kernel on a CPU."""


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context of a forward pass; fp32 is no autocast."""
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    return torch.autocast(device.type, dtype=half, enabled=dtype != torch.float32)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        if query.ndim == 4 and not dropout_p and query[..., 0].numel() * key.shape[-2] <= FEW:
            if is_causal:
                attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            return _products(query.bfloat16(), key.bfloat16(), value.bfloat16(), attn_mask, scale)
        query, key, value = (x.to(FUSED) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(FUSED)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Compute (B, H, Q, D) of queries (B, H, Q, D), and keys and values (B, K, L, D) that H / K heads share. A query that may read nothing
    gets the mean of all values."""
    batch, heads, length, width = query.shape
    scaled = query * (width**-0.5 if scale is None else scale)
    scores = (scaled.reshape(batch, key.shape[1], -1, width) @ key.mT).view(batch, heads, length, -1)
    if mask is not None:
        if mask.dtype == torch.bool:  # filling scores costs twice as much as adding to them
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -torch.inf)
        scores = scores + mask.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).min)
    return (scores.softmax(-1).view(batch, key.shape[1], -1, scores.shape[-1]) @ value).view(batch, heads, length, -1)


_KERNELS = torch.library.Library("aten", "IMPL", "AutocastCPU")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    warnings.filterwarnings("ignore", message=r"\s*Overriding a previously registered kernel")
    _KERNELS.impl("scaled_dot_product_attention", _attention, allow_override=True)
