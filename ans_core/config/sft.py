"""Settings of the stage `sft`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ans_core.config.section import Count, Positive, Weight, some_weight
from ans_core.config.training import AutoCheckpointing, Dtype, KeepingOptim, Lora, Validated


class Sft(Validated):
    """Supervised fine-tuning on the mixture: text cross-entropy + mask losses, as the Sa2VA family trains
    (LOG, README)."""

    optim: KeepingOptim = KeepingOptim(steps=1200, batch=16, lr=7e-4)
    """Neither steps nor epochs: the base, which must be a Sa2VA then, is passed through, and `rl` starts from
    it."""
    decoder_lr: Weight = 1.0
    """Factor on the learning rate of SAM2's mask decoder. Upstream: 1, at a rate 25 times smaller than a tiny
    model's."""
    lora: Lora = Lora()
    lora_ranks_from: str = ""
    """Folder of this base fine-tuned in full: each layer's rank is then what `lora_energy` of its change
    needs (4 to 128), and lora.alpha scales with it. Empty = lora.rank everywhere."""
    lora_ranks_files: str = ""
    """Its fingerprint; as prepare.sources has it."""
    lora_energy: Annotated[float, Field(gt=0, le=1)] = 0.9
    questions_per_image: Positive = 5
    frames: Positive = 4
    """Frames of a clip that the language model sees."""
    mixture: dict[str, Weight] = {
        "referring": 0.5, "region_caption": 0.25, "grounded_caption": 0.1, "video": 0.1, "extra": 0.1,
    }  # fmt: skip
    """Shares of the rows by kind of data; kinds without data do not count. `extra`: all data sets of
    prepare.sources together, which divide it by images x repeats. A data set named here has its own share
    instead."""
    length_window: Count = 0
    """Steps whose rows are grouped by their length in tokens, for less padding and balanced processes; 0: the
    mixture's order."""
    mask_weight: Weight = 2.0
    dice_weight: Weight = 0.5
    object_weight: Weight = 0.0
    """Of the object score of `[SEG]`: whether a frame shows the object. With it, the model's masks are blank
    where the score is negative; 0: as upstream, which does not train it and blanks nothing."""
    mask_points: Count = 12544
    """Points at which a mask's loss is sampled; 0 = all pixels of its target."""
    objects: Count = 0
    """Masks of every row with any, as upstream has it (5): drawn from more, repeated from fewer; 0 = each
    once."""
    mask_size: Positive = 256
    """Side of the mask targets that points are sampled from (upstream: 256)."""
    max_length: Positive = 8192
    """Tokens of a row: a picture and the questions about it. Questions that don't fit are left out and named."""
    dtype: Dtype = "auto"
    """Dtype of the forward pass (autocast); trained tensors are always fp32. fp32 also casts a half-precision
    base up."""
    checkpointing: AutoCheckpointing = "none"
    """layers: recompute the layers in the backward pass, for memory. auto: as few of them as the longest rows
    need on these GPUs."""

    @model_validator(mode="after")
    def _possible(self) -> Sft:
        some_weight(self.mixture.values(), key="mixture", why="nothing is trained on")
        some_weight(
            (self.mask_weight, self.dice_weight),
            key="mask_weight",
            why="no loss reaches what draws masks (dice_weight is 0, too); for text alone, take sets without masks",
        )
        return self
