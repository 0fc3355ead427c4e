"""Still pictures: seg embeddings -> mask logits in one batch, and logits -> masks of the picture's size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from ans_core.model.options import PredictOptions
from ans_core.model.sa2va import Sa2VA
from ans_core.types import Frames


def decode_stills(
    model: Sa2VA,
    pictures: Sequence[Frames],
    images: Sequence[Image.Image],
    embeddings: Sequence[Float[Tensor, "_ C"]],
    options: PredictOptions,
) -> list[Float[Tensor, "N 1 h4 w4"]]:
    """Decode low-resolution mask logits of all rows in one batch. Rows with equal `pictures` show the same image, which is encoded once."""
    shown = dict(zip(pictures, images, strict=True))
    place = {key: number for number, key in enumerate(shown)}
    features = model.sam2.encode(options.pixels(model, list(shown.values())))
    frame = torch.tensor([place[key] for key, own in zip(pictures, embeddings, strict=True) for _ in own], device=model.device)
    logits = model.sam2.shown(model.sam2.decode(features, frame, torch.cat(list(embeddings))))
    return [own[:, None] for own in logits.split([len(e) for e in embeddings])]


def upsample(logits: Float[Tensor, "h w"], *, size: int, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """Resize mask logits to the picture and threshold them: sigmoid > 0.5."""
    return upsample_logits(logits, size=size, height=height, width=width) > 0


def upsample_logits(logits: Float[Tensor, "h w"], *, size: int, height: int, width: int) -> Float[np.ndarray, "H W"]:
    """Resize mask logits to the picture in upstream's two bilinear steps: to the model's square, then to the picture."""
    square = F.interpolate(logits[None, None].float(), size=(size, size), mode="bilinear", align_corners=False)
    return F.interpolate(square, size=(height, width), mode="bilinear", align_corners=False)[0, 0].cpu().numpy()
