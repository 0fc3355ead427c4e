"""Two masks of a frame -> F (boundary accuracy), as DAVIS 2017's evaluation computes it. (J, region overlap, is metrics.mask's IoU.)

Convention of referring video sets (MeViS, Ref-YouTube-VOS): every frame of an expression counts, none is dropped; frames are
averaged first, then expressions. A frame where both masks are empty scores 1, also before the object first appears.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool

BAND = 0.008
"""Boundary pixels match within ceil(BAND * image diagonal) pixels (DAVIS)."""


def boundary_f(prediction: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"]) -> float:
    """Harmonic mean of the shares of boundary pixels near the other boundary. Both empty = 1, one empty = 0.

    Only the box around both masks is looked at: every boundary pixel lies in it, so the number is exactly the whole image's.
    """
    if prediction.shape != truth.shape:
        raise ValueError(f"predicted mask of shape {prediction.shape} against a true one of {truth.shape}")
    radius = math.ceil(BAND * math.hypot(*truth.shape))
    box = _box(prediction | truth)
    drawn, real = boundary(prediction[box]), boundary(truth[box])
    drawn_pixels, real_pixels = int(drawn.sum()), int(real.sum())
    if not drawn_pixels or not real_pixels:
        return float(drawn_pixels == real_pixels)
    precision = int((drawn & dilate(real, radius)).sum()) / drawn_pixels
    recall = int((real & dilate(drawn, radius)).sum()) / real_pixels
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def boundary(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """Pixels that differ from their right, lower or lower-right neighbour; where the image ends, it ends: an object touching the
    right or lower edge has no boundary there."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    return (mask ^ padded[:-1, 1:]) | (mask ^ padded[1:, :-1]) | (mask ^ padded[1:, 1:])


def dilate(mask: Bool[np.ndarray, "H W"], radius: int) -> Bool[np.ndarray, "H W"]:
    """With a disk: every pixel at distance <= radius of a set one."""
    height, width = mask.shape
    sums = np.zeros((height, width + 2 * radius + 1), np.int32)
    sums[:, radius + 1 : radius + 1 + width] = np.cumsum(mask, axis=1)
    sums[:, radius + 1 + width :] = sums[:, [radius + width]]
    out = np.zeros_like(mask)
    for dy in range(-radius, radius + 1):
        reach = math.isqrt(radius * radius - dy * dy)  # the disk's half width in this row
        top, bottom = max(0, -dy), min(height, height - dy)
        if top < bottom:
            run = sums[top + dy : bottom + dy]
            before, after = radius - reach, radius + reach + 1
            out[top:bottom] |= run[:, after : after + width] > run[:, before : before + width]
    return out


def _box(mask: Bool[np.ndarray, "H W"]) -> tuple[slice, slice]:
    """The set pixels and one more on every side, as far as the image goes."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return slice(0, 1), slice(0, 1)
    return slice(max(0, rows[0] - 1), rows[-1] + 2), slice(max(0, columns[0] - 1), columns[-1] + 2)
