"""Order samples from easy to hard, and tell how many of them take part at a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ans_core import rle
from ans_core.data.index import picture_key
from ans_core.types import Sample

Difficulty = Callable[[Sequence[Sample]], list[float]]


def _area(samples: Sequence[Sample]) -> list[float]:
    """Score small masks as hard; a sample without a mask counts as one that covers the whole picture."""
    shares = [sum(rle.area(m[0]) for m in s.masks if m[0] is not None) / (s.height * s.width) for s in samples]
    return [-share if sample.masks else -1.0 for share, sample in zip(shares, samples, strict=True)]


def _length(samples: Sequence[Sample]) -> list[float]:
    return [float(len(s.text.split())) for s in samples]


def _objects(samples: Sequence[Sample]) -> list[float]:
    """Count the samples of the same picture: the more there are, the easier an object is mistaken for another."""
    counts = Counter(picture_key(s) for s in samples)
    return [float(counts[picture_key(s)]) for s in samples]


CURRICULA: dict[str, Difficulty] = {"area": _area, "length": _length, "objects": _objects}


def easiest_first(samples: Sequence[Sample], by: str) -> list[int]:
    """Return the samples' indices, easiest first; equally hard samples keep their order."""
    difficulty = CURRICULA[by](samples)
    return sorted(range(len(samples)), key=lambda i: difficulty[i])


def taking_part(count: int, *, progress: float, start: float, until: float) -> int:
    """Return how many of `count` samples take part at `progress` (0 to 1) of the run: the share grows linearly from `start` to 1 at
    `until`."""
    share = 1.0 if progress >= until else start + (1 - start) * progress / until
    return max(1, min(count, round(share * count)))
