"""Settings of the stage `sft`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from ans_core.config.section import Count, Positive, Section, Weight, some_weight
from ans_core.config.training import Lora, Optim


class Sft(Section):
    """Supervised fine-tuning on the mixture: text cross-entropy + mask losses, as the Sa2VA family trains (LOG, README)."""

    optim: Optim = Optim(steps=1200, batch=16, lr=7e-4)
    decoder_lr: Weight = 1.0
    """Factor on the learning rate of SAM2's mask decoder. Upstream: 1, at a rate 25 times smaller than a tiny model's."""
    lora: Lora = Lora()
    questions_per_image: Positive = 5
    frames: Positive = 4
    """Frames of a clip that the language model sees."""
    mixture: dict[str, Weight] = {
        "referring": 0.5, "region_caption": 0.25, "grounded_caption": 0.1, "video": 0.1, "extra": 0.1,
    }  # fmt: skip
    """Shares of the rows by kind of data; kinds without data do not count. `extra`: all data sets of prepare.sources together, which divide
    it by images x repeats. A data set named here has its own share instead."""
    length_window: Count = 0
    """Steps whose rows are grouped by their length in tokens, for less padding and balanced processes; 0: the mixture's order."""
    mask_weight: Weight = 2.0
    dice_weight: Weight = 0.5
    mask_points: Positive = 12544
    mask_size: Positive = 256
    """Side of the mask targets that points are sampled from (upstream: 256)."""
    max_length: Positive = 8192
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of the forward pass (autocast); trained tensors are always fp32. fp32 also casts a half-precision base up."""

    @model_validator(mode="after")
    def _possible(self) -> Sft:
        some_weight(self.mixture.values(), key="mixture", why="nothing is trained on")
        return self
