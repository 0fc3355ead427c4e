"""The vision-language models that a Sa2VA can be built on, by transformers' `model_type`. A new one is a file
and a line."""

from __future__ import annotations

from types import MappingProxyType

from ans_core.model.backbones.base import Backbone
from ans_core.model.backbones.internvl import InternVL
from ans_core.model.backbones.qwen2_5_vl import Qwen2_5VL
from ans_core.model.backbones.qwen3_vl import Qwen3VL

BACKBONES: MappingProxyType[str, type[Backbone]] = MappingProxyType(
    {"internvl": InternVL, "qwen2_5_vl": Qwen2_5VL, "qwen3_vl": Qwen3VL}
)
