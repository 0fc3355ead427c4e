"""Pictures that an agent is shown: parts of frames, and their features from the frozen vision tower, each encoded once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ans_core import media, transforms
from ans_core.agent.workspace import Box, Workspace, content, cut, enlarged
from ans_core.data.views import Grid, Views
from ans_core.model import Sa2VA
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.prefill import encoded, visible
from ans_core.types import ImageRef

CELLS, GREY = 3, 127


@dataclass(frozen=True, kw_only=True)
class Crop:
    """A part of a frame, in native pixels."""

    frame: ImageRef
    box: Box

    @classmethod
    def of(cls, workspace: Workspace, name: str) -> Crop:
        """Return what an image of the workspace shows."""
        handle = workspace.image(name)
        return cls(frame=workspace.frames[handle.frame], box=handle.box)

    @classmethod
    def whole(cls, frame: ImageRef) -> Crop:
        """Return the whole frame."""
        return cls(frame=frame, box=(0, 0, *transforms.image_size(frame)))

    def picture(self, *, least: int) -> Image.Image:
        """Return its pixels, enlarged until the longer side has `least`."""
        return cut(self.frame, self.box, least=least)

    def views(self, model: Sa2VA) -> Views:
        """Return what the vision tower of `model` gets of it."""
        return visible(model, [self.picture(least=model.backbone.crop_side)])

    def grids(self, model: Sa2VA) -> tuple[Grid, ...]:
        """Return the grids of its views, which its size decides."""
        return model.backbone.cutter.grids(*enlarged(self.box, least=model.backbone.crop_side))

    def state(self) -> dict[str, Any]:
        """Return plain values for a training state; `Crop(**state)` reads them."""
        return {"frame": self.frame, "box": self.box}


class CropFeatures:
    """Features of crops by (hash of the frame, box): equal crops are encoded once while they are held. For one model."""

    def __init__(self, model: Sa2VA, *, most: int = 4096) -> None:
        """`most`: crops that are held; the oldest make room."""
        self.model, self.most = model, most
        self.encoded = 0
        """Crops that the vision tower has seen."""
        self._known: dict[tuple[str, Box], ImageFeatures] = {}

    @torch.no_grad()
    def of(self, crops: Sequence[Crop]) -> list[ImageFeatures]:
        """Return features before the projector, which may be trained. Each new crop is encoded by itself: in a batch its last bits would
        depend on the crops beside it, and a resumed run encodes other batches."""
        hashes = {frame: hashlib.sha256(content(frame)).hexdigest() for frame in dict.fromkeys(crop.frame for crop in crops)}
        keys = [(hashes[crop.frame], crop.box) for crop in crops]
        new = {key: crop for key, crop in zip(keys, crops, strict=True) if key not in self._known}
        with self.model.own_precision():
            for key, crop in new.items():
                (self._known[key],) = encoded(self.model, [crop.views(self.model)])
        self.encoded += len(new)
        features = [self._known[key] for key in keys]
        for key in list(self._known)[: max(0, len(self._known) - self.most)]:
            del self._known[key]
        return features


def pooled(seen: ImageFeatures) -> Float[Tensor, "C G G"]:
    """Return a picture's features (of a tiled one, its thumbnail's) averaged over 3 x 3 cells."""
    rows, columns = seen.grids[-1]
    cells = seen.values[-rows * columns :].float().cpu()
    return F.adaptive_avg_pool2d(cells.T.reshape(-1, rows, columns), CELLS)


def grey(model: Sa2VA) -> Crop:
    """Return a grey picture of the model's size: what all pictures have in common, which would make any two alike."""
    side = model.backbone.crop_side
    return Crop.whole(media.reference(Image.new("RGB", (side, side), (GREY, GREY, GREY))))


def joined(images: Sequence[ImageFeatures]) -> ImageFeatures | None:
    """Return the features of a row's pictures in the order of its text; None without pictures."""
    if not images:
        return None
    return ImageFeatures(
        values=torch.cat([image.values for image in images]), grids=tuple(grid for image in images for grid in image.grids)
    )
