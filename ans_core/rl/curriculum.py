"""Samples -> their order from easy to hard, and how many of them take part by a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ans_core import rle
from ans_core.data.mixture import picture_key
from ans_core.types import Sample

Difficulty = Callable[[Sequence[Sample]], list[float]]


def _area(samples: Sequence[Sample]) -> list[float]:
    """Small masks are hard; a sample without one counts as whole."""
    shares = [sum(rle.area(m[0]) for m in s.masks if m[0] is not None) / (s.height * s.width) for s in samples]
    return [-share if sample.masks else -1.0 for share, sample in zip(shares, samples, strict=True)]


def _length(samples: Sequence[Sample]) -> list[float]:
    return [float(len(s.text.split())) for s in samples]


def _objects(samples: Sequence[Sample]) -> list[float]:
    """The more samples a picture has, the more there is to be mistaken for."""
    counts = Counter(picture_key(s) for s in samples)
    return [float(counts[picture_key(s)]) for s in samples]


CURRICULA: dict[str, Difficulty] = {"area": _area, "length": _length, "objects": _objects}


def easiest_first(samples: Sequence[Sample], by: str) -> list[int]:
    """Indices; equally hard ones stay in their order."""
    difficulty = CURRICULA[by](samples)
    return sorted(range(len(samples)), key=lambda i: difficulty[i])


def taking_part(count: int, *, progress: float, start: float, until: float) -> int:
    """How many of `count` samples take part at `progress` (0 to 1) of the run: from the share `start` linearly to all at `until`."""
    share = 1.0 if progress >= until else start + (1 - start) * progress / until
    return max(1, min(count, round(share * count)))
