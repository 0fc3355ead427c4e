"""The linear layers of a language model's decoder layers to 8 bits, by torchao: nothing else of a model
changes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

Quantization = Literal["int8", "fp8"]
"""int8: weights in 8 bits with a scale for each output, computed in the model's own precision. fp8: weights
and, at each call, inputs in float8_e4m3 with a scale for each row; it takes a GPU that multiplies such
numbers."""
FP8_CAPABILITY = (8, 9)
"""Of NVIDIA's Ada; Hopper has 9.0."""


def missing() -> bool:
    return importlib.util.find_spec("torchao") is None


def check(scheme: str, device: torch.device) -> Quantization:
    """Return what was asked for. Raises ValueError if it is unknown, torchao is missing, or the device can't
    do it."""
    if scheme not in get_args(Quantization):
        raise ValueError(f"quantize {scheme!r}; there are {', '.join(get_args(Quantization))}")
    if missing():
        raise ValueError(
            f"quantize {scheme!r} needs torchao, which is an extra: pip install -c requirements/quantize.txt "
            "-e '.[quantize]'"
        )
    if scheme == "fp8":
        if device.type != "cuda":
            raise ValueError(
                f"quantize 'fp8' computes in 8-bit floats, which a {device.type.upper()} does not: use "
                "'int8' here"
            )
        if (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
            name = (
                f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"
            )
            raise ValueError(
                f"quantize 'fp8' needs a GPU of compute capability 8.9 (Ada, Hopper) or later, {name} has "
                "none: use 'int8'"
            )
    return "int8" if scheme == "int8" else "fp8"


def quantizer(language_model: nn.Module, scheme: Quantization) -> Callable[[nn.Module], None]:
    """Return a function that quantizes a layer in place if it is one of this language model's, so that a
    model can be quantized layer by layer while it is loaded. The embeddings, the head and what reads `[SEG]`
    are no layers and stay as they are."""
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8WeightOnlyConfig,
        PerRow,
        quantize_,
    )

    module_ids = {id(module) for module in language_model.modules()}

    def work(layer: nn.Module) -> None:
        if id(layer) not in module_ids:
            return
        config: Any = (
            Int8WeightOnlyConfig()
            if scheme == "int8"
            else Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
        )
        if scheme == "fp8" and (dtype := next(layer.parameters()).dtype) != torch.bfloat16:
            dtype_name = str(dtype).removeprefix("torch.")
            raise ValueError(
                f'quantize "fp8" takes weights in bfloat16, not in {dtype_name}: give dtype="bfloat16", or use "int8"'
            )
        quantize_(layer, config)

    return work


def is_quantized(tensor: Tensor) -> bool:
    return type(tensor.data).__module__.partition(".")[0] == "torchao"
