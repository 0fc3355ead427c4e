"""Options of one call of `predict`: how masks go through clips, and what SAM2's pictures are normalised with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ans_core import transforms
from ans_core.model.config import VideoMode
from ans_core.model.sa2va import Sa2VA

Constants = Literal["fp32", "bf16"]
"""Mean and standard deviation that SAM2's pictures are normalised with. `bf16`: rounded, as the reference's inference does by accident (up
to 0.008 off), for numbers equal to its own; `fp32` is what SAM2, and the reference in training, uses."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How masks go through clips, and what SAM2's pictures are normalised with."""

    mode: VideoMode = "sa2va"
    constants: Constants = "fp32"

    def __post_init__(self) -> None:
        if self.constants not in get_args(Constants):
            raise ValueError(f"constants {self.constants!r}; there are {', '.join(get_args(Constants))}")

    def pixels(self, model: Sa2VA, pictures: Sequence[Image.Image]) -> Float[Tensor, "B 3 S S"]:
        """What SAM2 sees of pictures."""
        constants = torch.bfloat16 if self.constants == "bf16" else torch.float32
        return transforms.normalise(pictures, size=model.sam2.image_size, constants=constants).to(model.device)
