"""Settings of the stage `base`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ans_core.config.section import Positive, Section
from ans_core.config.training import Optim


class Vision(Section):
    """InternViT + projector. Sizes are those of the profile's own tiny model; published weights bring their own config.json."""

    image_size: Positive = 96
    patch_size: Positive = 8
    hidden: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    mlp: Positive = 384


class Language(Section):
    hidden: Positive = 160
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 2
    mlp: Positive = 448


class Sam(Section):
    """SAM2. The decoder's width stays 256: its 8 heads are hard-coded and narrower ones did not learn (LOG)."""

    image_size: Positive = 128
    embed: Positive = 32
    heads: Positive = 1
    stages: tuple[int, int, int, int] = (1, 2, 3, 1)
    global_blocks: tuple[int, ...] = (4,)
    windows: tuple[int, int, int, int] = (8, 4, 8, 4)
    width: Positive = 256
    memory_layers: Positive = 2
    memory_width: Positive = 64
    max_object_pointers: Positive = 16


class Base(Section):
    """The model that SFT starts from: published weights, or a tiny one pre-trained here from random weights."""

    source: Literal["scratch", "published"] = "scratch"
    internvl: str = ""
    """published: hub id or local folder in the hub's layout of InternVL2.5 (or of a whole Sa2VA release, then `sam2` stays empty)."""
    sam2: str = ""
    """published: hub id, folder or file of SAM2 weights (sam2_hiera_large.pt)."""
    template: Literal["qwen_chat", "internlm2_chat", "phi3_chat"] = "qwen_chat"
    vision: Vision = Vision()
    language: Language = Language()
    sam: Sam = Sam()
    vision_words: Optim = Optim(steps=1600, batch=32, lr=2e-3)
    """Vision tower alone: the words of region captions from the regions' features."""
    alignment: Optim = Optim(steps=300, batch=32, lr=3e-3, weight_decay=0.01)
    """Word embeddings and projector: image tokens near the words for what they show."""
    sam_images: Optim = Optim(steps=600, batch=16, lr=8e-4, weight_decay=0.01)
    sam_clips: Optim = Optim(steps=300, batch=4, lr=2e-4, weight_decay=0.01)
    """Clips a step; twice as many pictures come beside them."""
    language_text: Optim = Optim(steps=600, batch=16, lr=1e-3)
    questions_per_image: Positive = 8
    mixture: dict[str, Annotated[float, Field(ge=0)]] = {"referring": 0.6, "region_caption": 0.3, "grounded_caption": 0.1}
    """Shares of the language side's pre-training: places and boxes of expressions, captions of regions and of pictures."""
    attention_weight: Annotated[float, Field(ge=0)] = 4.0
    """Of supervised attention beside the language side's text loss: looking at what a question names (LOG)."""
    box_weight: Annotated[float, Field(ge=0)] = 4.0
    """Of the box head beside it: where that is."""
    click_weight: Annotated[float, Field(ge=0)] = 4.0
    """Of the warm-up of text_hidden_fcs beside it: where SAM2 would have to be clicked. 0 leaves it untrained."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of the language side's forward pass (autocast): half the time on a CPU or GPU with bf16 instructions, slower without; weights are
    fp32. The other phases run in fp32: on a CPU their convolutions are faster so (LOG)."""
