"""Pictures that an agent is shown: parts of frames, and their features from the frozen vision tower, each
encoded once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cachetools
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ans_core.agent.workspace import Box, Workspace, content, cut, enlarged
from ans_core.data.views import Grid, Views
from ans_core.inference.prefill import encoded, visible
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.pictures import media, transforms
from ans_core.types import ImageRef

CROP_BYTES = 4 * 2**30
"""Of features that are held, on the model's device. A view of 448 pixels has 256 cells x 4096 values x 2
bytes = 2 MiB (InternViT-300M in bf16), a picture in 20 tiles and as a whole 42 MiB: 97 such, or 680 crops of
3 views, about one step of RFT with the profiles pixelis-*."""
CELLS, GREY = 3, 127
Key = tuple[str, Box]
"""Hash of a frame, box."""


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
    def full_frame(cls, frame: ImageRef) -> Crop:
        """Return the whole frame."""
        return cls(frame=frame, box=(0, 0, *transforms.image_size(frame)))

    def picture(self, *, least: int) -> Image.Image:
        """Return its pixels, enlarged until the longer side has `least`."""
        return cut(self.frame, self.box, least=least)

    def views(self, model: Network) -> Views:
        """Return what the vision tower of `model` gets of it."""
        return visible(model, [self.picture(least=model.backbone.crop_side)])

    def grids(self, model: Network) -> tuple[Grid, ...]:
        """Return the grids of its views, which its size decides."""
        return model.backbone.cutter.grids(*enlarged(self.box, least=model.backbone.crop_side))

    def state(self) -> dict[str, Any]:
        """Return plain values for a training state; `Crop(**state)` reads them."""
        return {"frame": self.frame, "box": self.box}


class CropFeatures:
    """Features of crops by (hash of the frame, box): equal crops are encoded once while they are held. For
    one model."""

    def __init__(self, model: Network, *, most_bytes: int = CROP_BYTES) -> None:
        """`most_bytes`: of the features that are held; the least recently used make room."""
        self.model = model
        self.encoded = 0
        """Crops that the vision tower has seen."""
        self._cache: cachetools.LRUCache[Key, ImageFeatures] = cachetools.LRUCache(
            most_bytes, getsizeof=lambda features: features.values.nbytes
        )

    @torch.no_grad()
    def of(self, crops: Sequence[Crop]) -> list[ImageFeatures]:
        """Return features before the projector, which may be trained. Each new crop is encoded by itself: in
        a batch its last bits would depend on the crops beside it, and a resumed run encodes other batches."""
        hashes = {
            frame: hashlib.sha256(content(frame)).hexdigest()
            for frame in dict.fromkeys(crop.frame for crop in crops)
        }
        keys = [(hashes[crop.frame], crop.box) for crop in crops]
        with self.model.inference_autocast():
            features = {
                key: self._encode(key, crop) for key, crop in dict(zip(keys, crops, strict=True)).items()
            }
        return [features[key] for key in keys]

    @cachetools.cachedmethod(lambda self: self._cache, key=lambda self, key, crop: key)
    def _encode(self, key: Key, crop: Crop) -> ImageFeatures:
        self.encoded += 1
        (features,) = encoded(self.model, [crop.views(self.model)])
        return features


def pooled(seen: ImageFeatures) -> Float[Tensor, "C G G"]:
    """Return a picture's features (of a tiled one, its thumbnail's) averaged over 3 x 3 cells."""
    rows, columns = seen.grids[-1]
    cells = seen.values[-rows * columns :].float().cpu()
    return F.adaptive_avg_pool2d(cells.T.reshape(-1, rows, columns), CELLS)


def grey(side: int) -> Crop:
    """Return a grey square."""
    return Crop.full_frame(media.png(Image.new("RGB", (side, side), (GREY, GREY, GREY))))


def pooled_grey(features: CropFeatures) -> Float[Tensor, "C G G"]:
    """Return the pooled features of a grey picture of the model's size: what all pictures have in common, which
    would make any two alike."""
    (seen,) = features.of([grey(features.model.backbone.crop_side)])
    return pooled(seen)
