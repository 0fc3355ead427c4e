"""The precision of forward passes: fp32, or bf16 by autocast, whichever this machine computes faster.

A CPU without bf16 instructions (avx512_bf16, amx) emulates them: a matrix product takes some hundred times as
long, a convolution forty.

On a CPU that has them, autocast computes attention in its own way here. PyTorch's takes its fused kernel to
bf16, where that costs two to three times as much, backward pass included, while matrix products cost a
quarter. So attention is two matrix products in bf16 with a softmax between them,
as long as its scores are few, and the fused kernel in fp32 beyond.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ans_core.processor import processor

FEW = 2**25
"""Scores that are kept for the backward pass at most: 64 MB in bf16."""
FUSED = torch.float32
"""Dtype of the fused kernel on a CPU."""
SMALL, LARGE = (256, 32), (4096, 64)
"""(rows of a matrix, side of a picture) to measure with."""
EMULATED = 4.0
"""bf16 that takes this many times as long as fp32 on small matrices is emulated: where it is not, it took 0.2
to 1.3 times as long (a Xeon with amx, 1 to 16 threads), on a processor with AVX2 alone 57 times."""


def resolved(dtype: str, device: torch.device) -> str:
    """Return fp32 or bf16 for `auto`, as is faster on the device; the others stay. bf16 where it is emulated
    gives one warning."""
    if dtype == "auto":
        return "bf16" if bf16_is_faster(device) else "fp32"
    if dtype == "bf16":
        warn_if_emulated(device)
    return dtype


def inference_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to load weights in for inference: None keeps the stored one; float32 where the device
    emulates half precision."""
    return None if bf16_is_faster(device) else torch.float32


def bf16_is_faster(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return cpu_times()["bf16"] < cpu_times()["fp32"]


def described(device: torch.device) -> str:
    """Name the precision that `auto` chooses on the device, and why."""
    if device.type == "cuda":
        return f"{resolved('auto', device)} on {torch.cuda.get_device_name(device)}"
    ratio = cpu_times()["bf16"] / cpu_times()["fp32"]
    return f"{resolved('auto', device)} on {processor()} (bf16 takes {ratio:.2g} times as long as fp32)"


def of_weights(dtype: torch.dtype, device: torch.device | str) -> str:
    """Return the line that says how a model computes that is not trained: in the precision of its weights."""
    return f"precision: {str(dtype).removeprefix('torch.')} on {device}"


@functools.cache
def warn_if_emulated(device: torch.device) -> None:
    """Warn, once, where half precision is slower than fp32."""
    if not bf16_is_faster(device):
        logging.warning(
            '%s computes half precision without instructions for it: dtype "auto" is faster here: %s',
            device,
            described(device),
        )


@functools.cache
def cpu_times() -> dict[str, float]:
    """Return the milliseconds of a matrix product and a 3x3 convolution on the CPU in fp32 and bf16, best of
    five.

    They are measured once for a processor and a torch, and then read from the user's cache folder, so that
    all stages and processes of a run choose alike: what the first one has written counts."""
    folder = cache_folder()
    # The two variables hide instructions from torch and oneDNN.
    hidden = [os.environ.get(name, "") for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")]
    key = " ".join([processor(), torch.__version__, *hidden])
    file = folder / f"precision-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if file.is_file():
        try:
            return dict(json.loads(file.read_text(encoding="utf-8")))
        except ValueError:  # a power cut left it empty
            file.unlink(missing_ok=True)
    # Small ones first, since emulation takes seconds for large ones; of these, starting threads and kernels
    # hides nothing.
    fp32 = fp32_ms()
    ratio = _milliseconds(torch.bfloat16, *SMALL) / _milliseconds(torch.float32, *SMALL)
    times = {
        "fp32": fp32,
        "bf16": ratio * fp32 if ratio > EMULATED else _milliseconds(torch.bfloat16, *LARGE),
    }
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(json.dumps(times), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(temporary, file)
        temporary.unlink()
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        logging.info(
            "what bf16 costs is measured anew by every process, since %s can't be written: %s", file, error
        )
    return times


def cache_folder() -> Path:
    """Return the user's cache folder; where there is no home that can be written to, as in some containers, one
    among the temporary files."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "ans").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: nobody says where the home is
        folder = Path(tempfile.gettempdir(), f"ans-{os.getuid()}")
        folder.mkdir(exist_ok=True)
    return folder


def fp32_ms() -> float:
    """Return the milliseconds of the product and the convolution in fp32, measured now."""
    return _milliseconds(torch.float32, *LARGE)


@torch.no_grad()
def _milliseconds(dtype: torch.dtype, rows: int, side: int) -> float:
    left, right = torch.ones(rows, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
    pictures, kernels = torch.ones(4, 32, side, side, dtype=dtype), torch.ones(32, 32, 3, 3, dtype=dtype)
    return sum(
        _best_of_five(work) for work in (lambda: left @ right, lambda: F.conv2d(pictures, kernels, padding=1))
    )


def _best_of_five(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(6):  # the first one makes oneDNN's kernels
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return min(times[1:])


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
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Compute (B, H, Q, D) of queries (B, H, Q, D), and keys and values (B, K, L, D) that H / K heads share.
    A query that may read nothing gets the mean of all values."""
    batch, heads, length, width = query.shape
    scaled = query * (width**-0.5 if scale is None else scale)
    scores = (scaled.reshape(batch, key.shape[1], -1, width) @ key.mT).view(batch, heads, length, -1)
    if mask is not None:
        if mask.dtype == torch.bool:  # filling scores costs twice as much as adding to them
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -torch.inf)
        scores = scores + mask.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).min)
    return (scores.softmax(-1).view(batch, key.shape[1], -1, scores.shape[-1]) @ value).view(
        batch, heads, length, -1
    )


_KERNELS = torch.library.Library("aten", "IMPL", "AutocastCPU")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    warnings.filterwarnings("ignore", message=r"\s*Overriding a previously registered kernel")
    _KERNELS.impl("scaled_dot_product_attention", _attention, allow_override=True)
