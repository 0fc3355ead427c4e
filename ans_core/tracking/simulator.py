"""True masks in, the prompts that a user might give for them out: points, boxes, masks, and clicks that
correct a prediction."""

from __future__ import annotations

from random import Random
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from sam2.modeling.sam2_utils import sample_random_points_from_errors
from scipy.ndimage import distance_transform_edt
from torch import Tensor

PromptKind = Literal["point", "box", "mask"]

BOX_NOISE, MAX_BOX_NOISE = 0.1, 20
"""Corners of a box are off by up to this share of its sides and this many pixels (SAM2's training)."""
CLICKS_FROM_TRUTH = 0.1
"""Share of the corrective clicks that come from the true mask instead of the error region (SAM2's
training)."""
INSIDE, OUTSIDE, NONE = 1, 0, -1
TOP_LEFT, BOTTOM_RIGHT = 2, 3
"""SAM2's labels of points."""

Points = tuple[list[list[float]], list[int]]
"""(x, y) in pixels of the mask, and SAM2's label of each."""


def positive_points(
    mask: Bool[np.ndarray, "H W"], *, count: int, include_center: bool, rng: Random
) -> Points:
    """Choose points inside a mask that is not empty: the centre first if asked for, the others uniform and
    different while there are enough pixels."""
    ys, xs = np.nonzero(mask)
    chosen = [center(mask)] if include_center else []
    left = count - len(chosen)
    places = rng.sample(range(len(xs)), left) if left <= len(xs) else rng.choices(range(len(xs)), k=left)
    chosen += [[float(xs[i]), float(ys[i])] for i in places]
    return chosen, [INSIDE] * count


def center(mask: Bool[np.ndarray, "H W"]) -> list[float]:
    """Return the pixel that is farthest from the mask's edge; the first of several. The picture's edge counts
    as one."""
    depth = distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
    y, x = np.unravel_index(int(depth.argmax()), mask.shape)
    return [float(x), float(y)]


def center_at(mask: Bool[np.ndarray, "H W"], size: int) -> tuple[int, int]:
    """Return (row, column) of the centre once the mask is resized to a square: what is left of a mask that is
    too small for it."""
    x, y = center(mask)
    return int(y * size / mask.shape[0]), int(x * size / mask.shape[1])


def noisy_box(mask: Bool[np.ndarray, "H W"], *, rng: Random) -> Points:
    """Return the corners of the box around a mask that is not empty, moved by BOX_NOISE and kept within the
    picture."""
    ys, xs = np.nonzero(mask)
    x1, y1, x2, y2 = float(xs.min()), float(ys.min()), float(xs.max()), float(ys.max())
    dx, dy = (min(BOX_NOISE * side, MAX_BOX_NOISE) for side in (x2 - x1, y2 - y1))
    height, width = mask.shape

    def moved(value: float, by: float, most: int) -> float:
        return min(max(value + rng.uniform(-by, by), 0.0), most - 1.0)

    corners = [[moved(x, dx, width), moved(y, dy, height)] for x, y in ((x1, y1), (x2, y2))]
    return corners, [TOP_LEFT, BOTTOM_RIGHT]


def negative_point(height: int, width: int, *, count: int, rng: Random) -> Points:
    """Return one click outside, which says that the object is not there, padded to `count` points."""
    click = [float(rng.randrange(width)), float(rng.randrange(height))]
    return [click] + [[0.0, 0.0]] * (count - 1), [OUTSIDE] + [NONE] * (count - 1)


def points_for(
    mask: Bool[np.ndarray, "H W"],
    kind: Literal["point", "box"],
    *,
    count: int,
    include_center: bool,
    rng: Random,
) -> Points:
    """Return the points that prompt for a mask: `count` points, or the two corners of a box; a click outside
    for an empty mask."""
    if not mask.any():
        return negative_point(*mask.shape, count=count if kind == "point" else 2, rng=rng)
    if kind == "box":
        return noisy_box(mask, rng=rng)
    return positive_points(mask, count=count, include_center=include_center, rng=rng)


@torch.no_grad()
def corrected(
    prompt: dict[str, Tensor], logits: Float[Tensor, "N 1 h w"], target: Bool[Tensor, "N S S"]
) -> dict[str, Tensor]:
    """Add to each object's points one click where the prediction is wrong: inside where it misses, outside
    where it spills over; outside where nothing is wrong. Random numbers come from torch's global
    generator."""
    predicted = (
        F.interpolate(logits.float(), size=target.shape[-2:], mode="bilinear", align_corners=False) > 0
    )
    if float(torch.rand(())) < CLICKS_FROM_TRUTH:
        predicted = torch.zeros_like(predicted)
    points, labels = sample_random_points_from_errors(target[:, None], predicted)
    return {
        "point_coords": torch.cat([prompt["point_coords"], points.to(prompt["point_coords"].dtype)], dim=1),
        "point_labels": torch.cat([prompt["point_labels"], labels.to(prompt["point_labels"].dtype)], dim=1),
    }
