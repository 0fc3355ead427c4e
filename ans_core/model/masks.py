"""Low-resolution mask logits -> logits and masks of the picture's size."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def upsample(logits: Float[Tensor, "h w"], *, size: int, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """Resize mask logits to the picture and threshold them: sigmoid > 0.5."""
    return upsample_logits(logits, size=size, height=height, width=width) > 0


def upsample_logits(
    logits: Float[Tensor, "h w"], *, size: int, height: int, width: int
) -> Float[np.ndarray, "H W"]:
    """Resize mask logits to the picture in upstream's two bilinear steps: to the model's square, then to the
    picture."""
    square = F.interpolate(
        logits[None, None].float(), size=(size, size), mode="bilinear", align_corners=False
    )
    return (
        F.interpolate(square, size=(height, width), mode="bilinear", align_corners=False)[0, 0].cpu().numpy()
    )
