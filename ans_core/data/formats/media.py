"""A picture or clip that samples are about: its frames, their size, and the masks that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ans_core.data.formats import checks
from ans_core.pictures import orientation, rle, transforms
from ans_core.types import RLE, Frames, ImageRef, Sample, VideoFrames

Stated = tuple[int | None, int | None]
"""[height, width] that annotations give; None where they don't."""
UNSTATED: Stated = (None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """One picture, several (`stills`), or the frames of a clip."""

    frames: Frames
    height: int
    """Of the first frame."""
    width: int
    stills: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width)."""
        return self.height, self.width

    @property
    def stem(self) -> str:
        """Return the name of a picture's file, without its suffix."""
        return self.frames[0].stem  # type: ignore[union-attr]  # readers that name samples by files have files

    def sample(self, **fields: Any) -> Sample:
        """Make a sample about it."""
        return Sample(frames=self.frames, stills=self.stills, height=self.height, width=self.width, **fields)

    def mask(self, segmentation: object, where: str, *, faults: checks.Faults | None = None) -> RLE:
        """Decode one object's mask; it must have the frames' size and at least one pixel. `faults` counts
        polygons that are left out."""
        made = self.some_mask(segmentation, where, faults=faults)
        if rle.area(made) == 0:
            raise checks.NoPixelError(
                f"{where}: the mask has no pixel; draw it again or leave it out (no object at all: an empty "
                "list of masks)"
            )
        return made

    def some_mask(self, segmentation: object, where: str, *, faults: checks.Faults | None = None) -> RLE:
        """Decode a mask as `mask` does, but allow an empty one."""
        size = {"height": self.height, "width": self.width}
        try:
            made = rle.from_annotation(segmentation, **size, where=where)
        except rle.NoOutlineError as error:
            raise checks.NoPixelError(str(error)) from None
        except ValueError as error:
            raise checks.DataError(str(error)) from None
        if faults:
            faults.notes["polygons of fewer than 3 points are left out"] += rle.left_out(segmentation, **size)
        return made

    def usable_mask(self, segmentation: object, where: str, *, faults: checks.Faults) -> RLE:
        """Decode a mask as `mask` does, but raise Unusable for an empty one and for none: published sets have
        objects smaller than a pixel."""
        try:
            made = self.some_mask(segmentation, where, faults=faults)
        except checks.NoPixelError:
            raise checks.Unusable("no mask: no polygon [x1, y1, x2, y2, ...] of at least 3 points") from None
        if rle.area(made) == 0:
            raise checks.Unusable("a mask without a pixel")
        return made


def picture_of(image: ImageRef, where: str, *, stated: Stated = UNSTATED) -> Media:
    """Read a picture's size from the file's header, without the pixels.

    A stated size below 1 is unknown, too, as VGG's annotator writes -1. Where an EXIF tag turns the picture
    by a quarter, `stated` tells whether the annotations are of the upright picture or of the stored pixels.
    Where it does not, they are of the stored pixels, as in COCO; `upright` turns their masks.
    """
    stated = tuple(None if isinstance(side, int | float) and side <= 0 else side for side in stated)  # type: ignore[assignment]
    try:
        (width, height), turn = transforms.stored(image)
    except ValueError as error:
        raise checks.DataError(f"{where}: {error}") from None
    if orientation.swaps_sides(turn) and stated == (width, height):
        height, width = width, height
    elif stated[0] not in (None, height) or stated[1] not in (None, width):
        raise checks.DataError(
            f"{where}: the annotations are of a picture of [height, width] = {rle.short(list(stated))}, the "
            f"file has {[height, width]}; put the original there, or scale the annotations too"
        )
    return Media(frames=(image,), height=height, width=width)


def upright_picture(image: ImageRef, where: str) -> Media:
    """Read the size of the upright picture from the file's header."""
    height, width = checks.shown_size(image, where)
    return Media(frames=(image,), height=height, width=width)


def together(pictures: Sequence[Media]) -> Media:
    """Join the pictures, at least one, that a question is about."""
    frames = tuple(picture.frames[0] for picture in pictures)
    return replace(pictures[0], frames=frames, stills=len(frames) > 1)


def upright(sample: Sample) -> Sample:
    """Turn the masks of pictures whose EXIF tag turns them, as `transforms.open_image` turns the pictures.
    Masks of upright pictures stay, as the sample's size tells where a picture is turned by a quarter."""
    if isinstance(sample.frames, VideoFrames):
        return sample
    turns = [transforms.stored(frame)[1] for frame in sample.frames]
    if set(turns) == {orientation.UPRIGHT}:
        return sample
    width, height = transforms.image_size(sample.frames[0])
    if (
        orientation.swaps_sides(turns[0])
        and (sample.height, sample.width) == (height, width)
        and height != width
    ):
        return sample
    masks = (zip(masklet, turns, strict=True) for masklet in sample.masks)
    shown = tuple(tuple(mask and rle.upright(mask, turn) for mask, turn in masklet) for masklet in masks)
    return replace(sample, masks=shown, height=height, width=width)
