"""The precision of forward passes: fp32, or bf16 by autocast.

On a CPU, autocast leaves attention in fp32 here: PyTorch's own takes it to bf16, where it costs 2 to 3 times as much, backward pass
included, while matrix products cost a quarter (`python perf/precision.py`).
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_ATTENTION = torch.float32
"""Dtype of attention on a CPU."""


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
        query, key, value = (x.to(CPU_ATTENTION) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(CPU_ATTENTION)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


_KERNELS = torch.library.Library("aten", "IMPL", "AutocastCPU")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    warnings.filterwarnings("ignore", message=r"\s*Overriding a previously registered kernel")
    _KERNELS.impl("scaled_dot_product_attention", _attention, allow_override=True)
