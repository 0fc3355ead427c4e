"""Options of one call of `predict`: which frames of a clip are seen, how masks go through it, and exact
parity with upstream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ans_core.data.views import Preparation, check_preparation
from ans_core.model.config import FrameChoice, VideoMode, check_frames
from ans_core.model.network import Network
from ans_core.pictures import transforms

Constants = Literal["fp32", "bf16"]
"""Precision of the mean and standard deviation that normalise SAM2's pictures. SAM2 and upstream's training
use `fp32`; upstream's inference rounds them to `bf16` by accident (up to 0.008 off); choose it for equal
numbers."""


TinyRegions = Literal["largest", "none"]
"""Cells shown for a mask prompt so small that nearest sampling finds none: the one cell that it covers most,
or none, as in upstream."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Which frames of a clip are seen, how masks go through it, and exact parity with upstream."""

    mode: VideoMode = "sa2va"
    constants: Constants = "fp32"
    tiny_regions: TinyRegions = "largest"
    preparation: Preparation = "training"
    """How the prompt is made; `upstream` gives Qwen-VL models the prompts and pictures of upstream's
    inference."""
    frames: int | None = None
    """Frames of a clip that the language model sees; None = as the checkpoint says."""
    frame_choice: FrameChoice | None = None
    """Which, in video mode `sa2va`; None = as the checkpoint says."""

    def __post_init__(self) -> None:
        for name, kind in (("constants", Constants), ("tiny_regions", TinyRegions)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name} {value!r}; there are {', '.join(get_args(kind))}")
        check_preparation(self.preparation)
        check_frames(1 if self.frames is None else self.frames, self.frame_choice or "uniform")
        if self.mode != "sa2va" and self.frame_choice == "first":
            raise ValueError(
                f"frame choice 'first' in video mode {self.mode}, which spreads the frames; leave it out, "
                "or use video mode sa2va"
            )

    def seen_frames(self, model: Network, frames: int) -> list[int]:
        """Return the indices of the frames of a clip that the language model sees."""
        return model.seen_frames(frames, self.mode, count=self.frames, choice=self.frame_choice)

    def pixels(self, model: Network, pictures: Sequence[Image.Image]) -> Float[Tensor, "B 3 S S"]:
        """Resize and normalise pictures for SAM2."""
        constants = torch.bfloat16 if self.constants == "bf16" else torch.float32
        return transforms.normalise(pictures, size=model.sam2.image_size, constants=constants).to(
            model.device
        )
