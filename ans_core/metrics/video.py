"""J (region overlap) and F (boundary accuracy) of two masks of a frame, as DAVIS 2017's evaluation computes
them; mean, recall and decay over an object's frames. Which frames and objects count differs between
benchmarks, so the caller decides it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from ans_core.pictures import rle
from ans_core.types import RLE

Mask = RLE | Bool[np.ndarray, "H W"]

BAND = 0.008
"""Boundary pixels match within ceil(BAND * image diagonal) pixels (DAVIS)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Statistics of one object's frames. recall: share of frames above .5; decay: mean of the first quarter
    minus mean of the last."""

    mean: float
    recall: float
    decay: float


def statistics(values: Sequence[float]) -> Statistics:
    """Return DAVIS' three statistics of at least one frame. Its own decay wraps at 256 frames (quarter marks
    as uint8); this one does not."""
    frames = np.asarray(values, float)
    quarter = (np.round(np.linspace(1, len(frames), 5) + 1e-10) - 1).astype(int)
    decay = frames[: quarter[1] + 1].mean() - frames[quarter[3] :].mean()
    return Statistics(mean=float(frames.mean()), recall=float((frames > 0.5).mean()), decay=float(decay))


def j_and_f(prediction: Mask, truth: Mask) -> tuple[float, float]:
    """Return J and F. J: intersection over union, both empty = 1. F: harmonic mean of the shares of boundary
    pixels near the other boundary; both empty = 1, one empty = 0.

    Only the box around both masks is processed: it holds every pixel that counts, so the numbers equal those
    of the whole image.
    """
    predicted, real = _pixels(prediction), _pixels(truth)
    if predicted.shape != real.shape:
        raise ValueError(
            f"predicted mask of shape {predicted.shape} against a true one of {real.shape}; resize the "
            "prediction"
        )
    box = _box(predicted, real)
    if box is None:
        return 1.0, 1.0
    grid = _Grid(predicted[box].shape, radius=math.ceil(BAND * math.hypot(*real.shape)))
    ours, theirs = grid.bits(predicted[box]), grid.bits(real[box])
    both, either = (ours & theirs & grid.inside).bit_count(), ((ours | theirs) & grid.inside).bit_count()
    return both / either, _boundary_f(grid.boundary(ours), grid.boundary(theirs), grid)


def _pixels(mask: Mask) -> Bool[np.ndarray, "H W"]:
    """Decode a mask; a run-length code gives the transpose, which is contiguous by row. J and F of transposed
    masks are the same."""
    return rle.decode(mask).T if isinstance(mask, dict) else mask


def _box(*masks: Bool[np.ndarray, "H W"]) -> tuple[slice, slice] | None:
    """Return the box of the pixels set in any mask, one pixel wider on every side within the image; None: all
    are empty."""
    rows = np.flatnonzero(np.logical_or.reduce([mask.any(1) for mask in masks]))
    if not len(rows):
        return None
    top, bottom = max(0, rows[0] - 1), rows[-1] + 2
    columns = np.flatnonzero(np.logical_or.reduce([mask[top:bottom].any(0) for mask in masks]))
    return slice(top, bottom), slice(max(0, columns[0] - 1), columns[-1] + 2)


def _boundary_f(predicted: int, real: int, grid: _Grid) -> float:
    predicted_pixels, real_pixels = predicted.bit_count(), real.bit_count()
    if not predicted_pixels or not real_pixels:
        return float(predicted_pixels == real_pixels)
    precision = (predicted & grid.dilated(real)).bit_count() / predicted_pixels
    recall = (real & grid.dilated(predicted)).bit_count() / real_pixels
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


class _Grid:
    """Masks of one size as integers with one bit per pixel, so that an operation on a whole mask is one on an
    integer. Rows follow one another, each with a margin for bits that are shifted out of it."""

    def __init__(self, shape: tuple[int, ...], *, radius: int) -> None:
        self.height, self.width = shape
        self.stride = self.width + max(1, radius)
        everywhere = np.zeros((self.height, self.stride), bool)
        everywhere[:, : self.width] = True
        self.inside = _integer(everywhere)
        rows: dict[int, list[int]] = {}
        for dy in range(radius + 1):
            rows.setdefault(math.isqrt(radius * radius - dy * dy), []).append(dy)
        self.disk = sorted(rows.items())
        """(half width, rows above and below the middle that have it)"""

    def bits(self, mask: Bool[np.ndarray, "h w"]) -> int:
        """Return a mask's integer; the last row and column are repeated beyond the image's edge, so nothing
        differs from its neighbour there."""
        framed = np.zeros((self.height + 1, self.stride), bool)
        framed[:-1, : self.width] = mask
        framed[:-1, self.width] = mask[:, -1]
        framed[-1] = framed[-2]
        return _integer(framed)

    def boundary(self, mask: int) -> int:
        """Return the pixels that differ from their right, lower or lower-right neighbour; an object touching
        the right or lower edge of the image has no boundary there."""
        right, below, diagonal = mask >> 1, mask >> self.stride, mask >> (self.stride + 1)
        return ((mask ^ right) | (mask ^ below) | (mask ^ diagonal)) & self.inside

    def dilated(self, mask: int) -> int:
        """Dilate with a disk: every pixel at distance <= radius of a set one (and some in the margin)."""
        row, reach, out = mask, 0, 0
        for half_width, rows in self.disk:
            while reach < half_width:
                step = min(2 * reach + 1, half_width - reach)
                row |= (row << step) | (row >> step)
                reach += step
            for dy in rows:
                out |= (row << dy * self.stride) | (row >> dy * self.stride) if dy else row
        return out


def _integer(pixels: Bool[np.ndarray, "h s"]) -> int:
    return int.from_bytes(np.packbits(pixels, bitorder="little").tobytes(), "little")
