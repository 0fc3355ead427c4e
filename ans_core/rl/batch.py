"""Samples of one step with their pictures for both encoders, and what the frozen encoders make of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ans_core.benchmarks.loops import true_mask
from ans_core.data.collate import resize_mask
from ans_core.data.tensor_batch import TensorBatch
from ans_core.data.views import Views
from ans_core.inference.prefill import visible
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.grounding import FrameFeatures
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.types import Sample

Box = tuple[int, int, int, int]
"""x1, y1, x2, y2 in native pixels, x2 and y2 exclusive."""
FramePart = tuple[int, Box]
"""Index of one of the sample's frames, and a box in it."""


@dataclass(frozen=True, kw_only=True)
class RlBatch(TensorBatch):
    """Samples of one step, one image each, with pictures for both encoders."""

    samples: tuple[Sample, ...]
    asked: tuple[str, ...]
    """The text from which loop 2 draws: the sample's caption or an expression with the same meaning."""
    views: list[Views]
    """Every sample's picture, for the vision tower."""
    pixels: Float[Tensor, "B 3 S S"]
    targets: Bool[Tensor, "B M M"]
    """The sample's mask; empty if it has none."""
    repeats: tuple[int, ...]
    """How often the sample stands before this place in the whole step: few data fill a step several times
    over."""

    @staticmethod
    def joined(batches: Sequence[RlBatch]) -> RlBatch:
        """Return one batch of the samples of several, in order."""
        return RlBatch(
            samples=tuple(sample for batch in batches for sample in batch.samples),
            asked=tuple(text for batch in batches for text in batch.asked),
            views=[views for batch in batches for views in batch.views],
            pixels=torch.cat([batch.pixels for batch in batches]),
            targets=torch.cat([batch.targets for batch in batches]),
            repeats=tuple(repeat for batch in batches for repeat in batch.repeats),
        )

    def take(self, indices: Sequence[int]) -> RlBatch:
        """Return these samples alone."""
        return RlBatch(
            samples=tuple(self.samples[i] for i in indices),
            asked=tuple(self.asked[i] for i in indices),
            views=[self.views[i] for i in indices],
            pixels=self.pixels[list(indices)],
            targets=self.targets[list(indices)],
            repeats=tuple(self.repeats[i] for i in indices),
        )


def rl_batch(
    samples: Sequence[Sample],
    asked: Sequence[str],
    model: Network,
    *,
    mask_size: int,
    repeats: Sequence[int] = (),
) -> RlBatch:
    """Read the samples' pictures. repeats: of each sample, for its seeds; none given means that each stands
    in the step once."""
    images = [transforms.open_image(s.frames[0]) for s in samples]
    empty = torch.zeros(mask_size, mask_size, dtype=torch.bool)
    masks = [resize_mask(rle.decode(true_mask(s)), mask_size) if s.masks else empty for s in samples]
    return RlBatch(
        samples=tuple(samples),
        asked=tuple(asked),
        views=[visible(model, [image]) for image in images],
        pixels=transforms.normalise(images, size=model.sam2.image_size),
        targets=torch.stack(masks),
        repeats=tuple(repeats) or (0,) * len(samples),
    )


@dataclass(frozen=True, kw_only=True)
class EncodedImages:
    """Features of the frozen encoders for a batch, computed once."""

    vision: list[ImageFeatures]
    frames: FrameFeatures | None
    """None if no loop draws in these pictures."""

    @staticmethod
    def joined(parts: Sequence[EncodedImages]) -> EncodedImages:
        frames = [part.frames for part in parts if part.frames is not None]
        together = None
        if frames:
            fine, middle, coarse = (
                torch.cat(maps) for maps in zip(*((f.fine, f.middle, f.coarse) for f in frames), strict=True)
            )
            together = FrameFeatures(fine=fine, middle=middle, coarse=coarse)
        return EncodedImages(vision=[features for part in parts for features in part.vision], frames=together)

    def take(self, kept: Sequence[int]) -> EncodedImages:
        return EncodedImages(
            vision=[self.vision[i] for i in kept],
            frames=None if self.frames is None else self.frames[list(kept)],
        )


@dataclass(frozen=True, kw_only=True)
class EncodedBatch(ABC):
    """Samples, their encoded pictures, and the model that reads them."""

    batch: RlBatch
    encoded: EncodedImages

    @property
    @abstractmethod
    def model(self) -> Network: ...

    @property
    def frames(self) -> FrameFeatures:
        assert self.encoded.frames is not None, "a loop that draws says so (Loop.decodes_masks)"
        return self.encoded.frames
