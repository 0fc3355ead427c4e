"""A still with masks in, a clip of it out: a camera that moves, things that pass in front. Frames and masks
move by the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ans_core.dist import rng_of
from ans_core.lazy import Lazy
from ans_core.pictures import media, rle, transforms
from ans_core.tracking.batch import ClipTensors
from ans_core.tracking.clips import Clip, load_window

TURN, ZOOM, SHIFT, SHEAR = 20.0, 0.25, 0.35, 0.1
"""Largest change over a whole clip: degrees, share of the size, share of the half picture, share."""
OCCLUDERS = 2
"""Most things that pass in front of the picture."""


def pseudo_clip(still: Clip, *, length: int, size: int, max_objects: int, rng: Random) -> ClipTensors:
    """Make a clip of `length` frames. Every object shows in the first frame; later ones may leave it, or be
    covered in part or whole."""
    # twice: an object must show before the last frame
    one = load_window(still, [0, 0], size=size, max_objects=max_objects, rng=rng)
    picture, masks = one.pixels[0], one.masks[:, 0]
    grid = F.affine_grid(camera(length, rng), [length, 1, size, size], align_corners=False)
    # outside: the mean colour
    frames = F.grid_sample(picture.expand(length, -1, -1, -1), grid, mode="bilinear", align_corners=False)
    moved = (
        F.grid_sample(
            masks.float().expand(length, -1, -1, -1), grid, mode="nearest", align_corners=False
        ).transpose(0, 1)
        > 0.5
    )
    for _ in range(rng.randint(0, OCCLUDERS)):
        cover, texture = (
            occluder(length, size, rng),
            picture.roll((rng.randrange(size), rng.randrange(size)), dims=(1, 2)),
        )
        frames = torch.where(cover[:, None], texture, frames)
        moved = moved & ~cover
    first = moved[:, 0].flatten(1).any(1)
    return ClipTensors(
        pixels=frames, masks=moved[first], has_truth=torch.ones(int(first.sum()), length, dtype=torch.bool)
    )


class PseudoClips(Lazy[Clip]):
    """One pseudo-clip of each still, in the model's square, as a clip to follow. A still's name decides its
    camera and what passes in front: the clips are the same each time and in every run. One is made each time
    it is asked for."""

    def __init__(self, stills: Sequence[Clip], *, length: int, size: int) -> None:
        self._stills, self._length, self._size = stills, length, size

    def __len__(self) -> int:
        return len(self._stills)

    def item(self, number: int) -> Clip:
        still = self._stills[number]
        rng = rng_of("memory validation", still.name)
        made = pseudo_clip(still, length=self._length, size=self._size, max_objects=0, rng=rng)
        masklets = tuple(tuple(rle.encode(mask) for mask in masks) for masks in made.masks.numpy())
        return Clip(
            name=still.name,
            frames=tuple(map(media.reference, transforms.denormalise(made.pixels))),
            masklets=masklets,
        )


def camera(length: int, rng: Random) -> Float[Tensor, "F 2 3"]:
    """Return an affine map of every frame: the identity at first, then a steady change by turn, zoom, shift
    and shear."""
    turn, zoom, shear = (
        math.radians(rng.uniform(-TURN, TURN)),
        rng.uniform(-ZOOM, ZOOM),
        rng.uniform(-SHEAR, SHEAR),
    )
    right, down = rng.uniform(-SHIFT, SHIFT), rng.uniform(-SHIFT, SHIFT)
    maps = []
    for f in range(length):
        t = f / max(1, length - 1)
        scale, cos, sin = math.exp(t * zoom), math.cos(t * turn), math.sin(t * turn)
        maps.append(
            [[scale * cos, scale * (t * shear - sin), t * right], [scale * sin, scale * cos, t * down]]
        )
    return torch.tensor(maps)


def occluder(length: int, size: int, rng: Random) -> Tensor:
    """Return (F, S, S): an ellipse that comes in from one side, not there in the first frame, and crosses the
    picture."""
    width, height = (rng.uniform(0.1, 0.3) for _ in range(2))
    direction, place = rng.uniform(0, 2 * math.pi), rng.uniform(-0.6, 0.6)
    side = torch.linspace(-1, 1, size)
    y, x = side[:, None], side[None]
    covers = []
    for f in range(length):
        along = -2.0 + 4.0 * f / max(1, length - 1)  # the corners are sqrt(2) from the middle
        cx = along * math.cos(direction) - place * math.sin(direction)
        cy = along * math.sin(direction) + place * math.cos(direction)
        covers.append(((x - cx) / width) ** 2 + ((y - cy) / height) ** 2 < 1)
    return torch.stack(covers)
