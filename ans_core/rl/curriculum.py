"""Order samples from easy to hard, and tell how many of them take part at a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Int

from ans_core.data.index import picture_digest
from ans_core.data.selection import Selected
from ans_core.pictures import rle
from ans_core.types import Sample

Difficulty = Callable[[Sequence[Sample]], Iterable[float]]
"""Of every sample; NaN where it is not known."""


def _area(samples: Sequence[Sample]) -> Iterable[float]:
    """Score small masks as hard. Nothing is known where nothing is meant: a share of such samples that grows
    or shrinks with the size of masks would practise another answer than `rl.absent` says."""
    for s in samples:
        share = sum(rle.area(m[0]) for m in s.masks if m[0] is not None) / (s.height * s.width)
        yield -share if s.masks else math.nan


def _length(samples: Sequence[Sample]) -> Iterable[float]:
    return (float(len(s.text.split())) if s.text else math.nan for s in samples)


def _objects(samples: Sequence[Sample]) -> Iterable[float]:
    """Count the samples of the same picture: the more there are, the easier an object is mistaken for
    another."""
    keys = (
        samples.picture_keys
        if isinstance(samples, Selected)
        else np.array([picture_digest(s) for s in samples], dtype="S16")
    )
    _, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts[places].astype(float)


CURRICULA: dict[str, Difficulty] = {"area": _area, "length": _length, "objects": _objects}


def easiest_first(samples: Sequence[Sample], by: str) -> Int[np.ndarray, " samples"]:
    """Return the samples' indices, easiest first; equally hard samples keep their order. Those of unknown
    difficulty are spread evenly among the others."""
    difficulty = np.fromiter(CURRICULA[by](samples), dtype=np.float64, count=len(samples))
    unknown, known = np.flatnonzero(np.isnan(difficulty)), np.flatnonzero(~np.isnan(difficulty))
    known = known[np.argsort(difficulty[known], kind="stable")]
    places = np.concatenate(
        [(np.arange(len(some)) + 0.5) / len(some) for some in (known, unknown) if len(some)]
    )
    return np.concatenate([known, unknown])[np.argsort(places, kind="stable")]


def taking_part(count: int, *, progress: float, start: float, until: float) -> int:
    """Return how many of `count` samples take part at `progress` (0 to 1) of the run: the share grows
    linearly from `start` to 1 at `until`."""
    share = 1.0 if progress >= until else start + (1 - start) * progress / until
    return max(1, min(count, round(share * count)))
