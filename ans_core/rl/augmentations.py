"""Another view of a sample's picture, in which its region lies elsewhere: (picture, mask) -> (picture, mask).

Loop 1 pays a caption also by what the inverse model draws from it in such views (`rl.views`). A caption that
only says where the thing is leads to another place there; one that says what it is leads to the thing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool
from PIL import Image

Mask = Bool[np.ndarray, "H W"]
View = tuple[Image.Image, Bool[np.ndarray, "h w"]]
Augmentation = Callable[[Image.Image, Mask, random.Random], View]

LEAST_CROPPED, MOST_CROPPED = 0.5, 0.8
"""Share of a side that a crop keeps, unless the region is larger."""


def mirrored(image: Image.Image, mask: Mask, rng: random.Random) -> View:
    """Swap left and right."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), np.ascontiguousarray(mask[:, ::-1])


def turned(image: Image.Image, mask: Mask, rng: random.Random) -> View:
    """Turn by 180 degrees."""
    return image.transpose(Image.Transpose.ROTATE_180), np.ascontiguousarray(mask[::-1, ::-1])


def cropped(image: Image.Image, mask: Mask, rng: random.Random) -> View:
    """Cut out a random part of the picture in which the whole region lies."""
    share = rng.uniform(LEAST_CROPPED, MOST_CROPPED)
    left, right = _span(np.any(mask, axis=0), share, rng)
    top, bottom = _span(np.any(mask, axis=1), share, rng)
    return image.crop((left, top, right, bottom)), np.ascontiguousarray(mask[top:bottom, left:right])


def _span(occupied: Bool[np.ndarray, " N"], share: float, rng: random.Random) -> tuple[int, int]:
    """Return (start, end) of a random span that holds all occupied places and, where possible, has the share
    of the length."""
    places = np.flatnonzero(occupied)
    length = len(occupied)
    first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 1)
    size = max(round(length * share), last - first)
    start = rng.randint(max(0, last - size), min(first, length - size))
    return start, start + size


AUGMENTATIONS: dict[str, Augmentation] = {"mirrored": mirrored, "turned": turned, "cropped": cropped}
