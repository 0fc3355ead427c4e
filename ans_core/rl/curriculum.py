"""Order samples from easy to hard, and tell how many of them take part at a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from ans_core.data.index import picture_key
from ans_core.pictures import rle
from ans_core.types import Sample

Difficulty = Callable[[Sequence[Sample]], list[float]]
"""NaN where it is not known."""


def _area(samples: Sequence[Sample]) -> list[float]:
    """Score small masks as hard. Nothing is known where nothing is meant: a share of such samples that grows or shrinks with the size of
    masks would practise another answer than `rl.absent` says."""
    shares = [sum(rle.area(m[0]) for m in s.masks if m[0] is not None) / (s.height * s.width) for s in samples]
    return [-share if sample.masks else math.nan for share, sample in zip(shares, samples, strict=True)]


def _length(samples: Sequence[Sample]) -> list[float]:
    return [float(len(s.text.split())) if s.text else math.nan for s in samples]


def _objects(samples: Sequence[Sample]) -> list[float]:
    """Count the samples of the same picture: the more there are, the easier an object is mistaken for another."""
    counts = Counter(picture_key(s) for s in samples)
    return [float(counts[picture_key(s)]) for s in samples]


CURRICULA: dict[str, Difficulty] = {"area": _area, "length": _length, "objects": _objects}


def easiest_first(samples: Sequence[Sample], by: str) -> list[int]:
    """Return the samples' indices, easiest first; equally hard samples keep their order. Those of unknown difficulty are spread evenly
    among the others."""
    difficulty = CURRICULA[by](samples)
    unknown = [i for i, value in enumerate(difficulty) if math.isnan(value)]
    known = sorted((i for i, value in enumerate(difficulty) if not math.isnan(value)), key=lambda i: difficulty[i])
    place = {i: (n + 0.5) / len(some) for some in (known, unknown) for n, i in enumerate(some)}
    return sorted(place, key=lambda i: place[i])


def taking_part(count: int, *, progress: float, start: float, until: float) -> int:
    """Return how many of `count` samples take part at `progress` (0 to 1) of the run: the share grows linearly from `start` to 1 at
    `until`."""
    share = 1.0 if progress >= until else start + (1 - start) * progress / until
    return max(1, min(count, round(share * count)))
