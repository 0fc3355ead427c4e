"""Qwen2.5-VL: windowed vision attention; `[SEG]` takes the state after the last norm."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from ans_core.model.backbones.qwen_vl import QwenVL


class Qwen2_5VL(QwenVL):
    model_type = "qwen2_5_vl"
    mean, std = tuple(OPENAI_CLIP_MEAN), tuple(OPENAI_CLIP_STD)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"

    @classmethod
    def build(cls, sizes: dict[str, Any]) -> nn.Module:
        config: Any = Qwen2_5_VLConfig(**sizes)
        return cast(nn.Module, Qwen2_5_VLForConditionalGeneration(config))
