"""The precision of forward passes: fp32, or bf16 by autocast.

On a CPU, autocast leaves attention and convolutions in fp32 here: PyTorch's own list takes them to bf16, where they cost 2 to 3 times as
much, backward pass included, while matrix products cost a quarter to a half (`python perf/precision.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_ATTENTION = torch.float32


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


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.conv2d(x.float(), weight.float(), None if bias is None else bias.float(), stride, padding, dilation, groups)


_KERNELS = torch.library.Library("aten", "IMPL", "AutocastCPU")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    warnings.filterwarnings("ignore", message=r"\s*Overriding a previously registered kernel")
    _KERNELS.impl("scaled_dot_product_attention", _attention, allow_override=True)
    _KERNELS.impl("conv2d", _convolution, allow_override=True)
