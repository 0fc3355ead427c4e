"""Settings of the stage `memory`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from ans_core.config.section import (
    Count,
    Impossible,
    Listed,
    Name,
    Positive,
    Rate,
    Section,
    Share,
    Weight,
    some_weight,
)
from ans_core.config.training import DataOptim, Dtype, some_length

PromptName = Literal["point", "box", "mask"]


class MemoryPrompts(Section):
    """How objects are prompted in training: in the first frame that shows them."""

    kinds: dict[PromptName, Weight] = {"mask": 0.5, "point": 0.25, "box": 0.25}
    """Weights of the kinds of prompt; a clip draws one. SAM2's training: as here."""
    num_pos_points: Positive = 1
    """Clicks of a prompt by points. SAM2 answers one click with three masks, several with one."""
    include_center: bool = False
    """Whether the first click is the middle of the object; the others are uniform in it."""
    clicks: Count = 0
    """Corrective clicks on every frame that is prompted by points or a box (SAM2's training: 7)."""
    second_frame: Share = 0.0
    """Probability that a second frame of the clip is prompted, too."""

    @model_validator(mode="after")
    def _possible(self) -> MemoryPrompts:
        some_weight(self.kinds.values(), key="kinds", why="nothing is prompted")
        return self


class MemoryLoss(Section):
    """Weights of the loss; the defaults are those of SAM2's training."""

    kind: Literal["focal", "bce"] = "focal"
    mask: Weight = 20.0
    dice: Weight = 1.0
    iou: Weight = 1.0
    object: Rate = 1.0
    """Of the object score, which is always supervised: SAM2 draws nothing where it is negative."""

    @model_validator(mode="after")
    def _possible(self) -> MemoryLoss:
        some_weight((self.mask, self.dice), key="mask", why="no mask is learned")
        return self


class Memory(Section):
    """Training of SAM2's memory on clips, between `base` and `sft`."""

    train: bool = False
    """false passes the base through."""
    validate_only: bool = False
    """Measure J&F of the base and pass it through."""
    trainable_modules: Listed[Name] = ("memory_attention", "memory_encoder")
    """Modules and parameters of SAM2 by name, as in sam_mask_decoder, sam_prompt_encoder.mask_downscaling,
    image_encoder, obj_ptr_proj."""
    optim: DataOptim = DataOptim(steps=400, batch=4, lr=1e-4, weight_decay=0.01)
    """`batch` counts clips."""
    data: Listed[Name] = ()
    """Names of the data sets to train on (their split `train`) and to validate on (`val`); empty: all that
    hold masks."""
    image_share: Share = 0.0
    """Share of the clips that are made of stills: a camera that moves, things that pass in front."""
    frames: Positive = 8
    """Frames of a training clip, and of a validation clip made of a picture."""
    max_gap: Positive = 1
    """Frames of a video are taken up to so many apart."""
    max_objects: Count = 3
    """Objects of a clip that are trained in one step; 0: all."""
    objects_at_once: Positive = 16
    """Objects in one pass through SAM2; more are divided among several."""
    image_size: Count = 0
    """Side of the model's image; 0: the checkpoint's."""
    prompts: MemoryPrompts = MemoryPrompts()
    loss: MemoryLoss = MemoryLoss()
    dropout: Share = 0.1
    """In the memory attention. SAM2's training: as here; an attention that learns from nothing in few steps
    learns more without."""
    recompute: bool = True
    """Compute every frame again in the backward pass: a tenth of the activation memory and less, 1.13 times
    the time (docs/video.md)."""
    limit_train_batches: Count = 0
    """Batches of an epoch; 0: as many as show every clip once. J&F is measured after every epoch."""
    limit_val_batches: Count = 0
    """Validation clips, in batches of `optim.batch`; 0: all."""
    val_prompt: PromptName = "mask"
    keep_last: Count = 1
    """Newest epochs kept beside the best: those of them that are not the best are in `last/`."""
    clips_shown: Count = 4
    """Validation clips drawn as GIFs, predictions beside truth."""
    dtype: Dtype = "auto"
    """Dtype of the forward pass (autocast)."""

    @model_validator(mode="after")
    def _possible(self) -> Memory:
        some_length(self.optim)
        if self.frames < 2:
            raise Impossible(
                "frames", f"{self.frames} frame has no later one that would read its memory; give at least 2"
            )
        if self.train and self.validate_only:
            raise Impossible("validate_only", "train and validate_only exclude each other")
        if self.train and not self.trainable_modules:
            raise Impossible("trainable_modules", "nothing is trained; name modules, or set train to false")
        if self.image_size % 32:
            raise Impossible(
                "image_size",
                f"{self.image_size} is no multiple of 32: the image encoder halves it five times",
            )
        return self
