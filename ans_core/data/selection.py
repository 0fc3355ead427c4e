"""Data sets one after the other, and some of their samples, as sequences that hold a few numbers a sample and
read the sample when it is asked for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from jaxtyping import Int
from numpy.typing import DTypeLike

from ans_core.data.index import SampleIndex, picture_digest
from ans_core.data.outlines import digest_of_thing, outline_of, representatives, thing_of, unnamed_regions
from ans_core.data.regions import is_region
from ans_core.lazy import Lazy
from ans_core.types import Sample

WHOLE = -1
"""In place of a region's number: the sample itself."""


class Joined(Lazy[Sample]):
    """The samples of several data sets, and of each its columns (ans_core/data/outlines.py)."""

    def __init__(self, parts: Sequence[Sequence[Sample]]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.array(list(accumulate(map(len, self._parts))), dtype=np.int64)
        self.outlines = self._column("outlines", outline_of, np.uint16)
        self.things = self._column("things", lambda sample: thing_of(sample, picture_digest(sample)), "S16")
        self.unnamed = self._column("unnamed", lambda sample: len(unnamed_regions(sample)), np.int32)
        self.picture_keys = self._column("picture_keys", picture_digest, "S16")

    def _column(self, name: str, value_of: Callable[[Sample], object], dtype: DTypeLike) -> np.ndarray:
        """Return a value of every sample: an index has them, of a list they are computed."""
        parts = [
            getattr(part, name)
            if isinstance(part, SampleIndex)
            else np.array([value_of(sample) for sample in part], dtype=dtype)
            for part in self._parts
        ]
        # of one index they stay in its file
        return parts[0] if len(parts) == 1 else np.concatenate([np.array([], dtype=dtype), *parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def item(self, number: int) -> Sample:
        part = int(np.searchsorted(self._ends, number, side="right"))
        return self._parts[part][number - (int(self._ends[part - 1]) if part else 0)]

    def where(self, takes: Callable[[Sample], bool]) -> Int[np.ndarray, " some"]:
        """Return the numbers of the samples that `takes` says yes to; it is asked about one sample of each
        outline."""
        chosen = np.zeros(len(self), dtype=bool)
        for first, alike in representatives(self.outlines):
            if takes(self[first]):
                chosen |= alike
        return np.flatnonzero(chosen)


class Selected(Lazy[Sample]):
    """Samples of `joined` by number. `regions`: in place of a sample whose objects have no words, the one of
    this number, as a region with an empty caption; WHOLE for the sample itself."""

    def __init__(
        self,
        joined: Joined,
        numbers: Int[np.ndarray, " some"],
        regions: Int[np.ndarray, " some"] | None = None,
    ) -> None:
        self.joined, self.numbers = joined, numbers
        self.regions = np.full(len(numbers), WHOLE, dtype=np.int32) if regions is None else regions

    def __len__(self) -> int:
        return len(self.numbers)

    def item(self, number: int) -> Sample:
        sample, region = self.joined[int(self.numbers[number])], int(self.regions[number])
        if region == WHOLE:
            return sample
        place = unnamed_regions(sample)[region]
        return replace(
            sample,
            sample_id=f"{sample.sample_id}/{place}",
            task="region_caption",
            masks=(sample.masks[place],),
        )

    def __add__(self, other: Selected) -> Selected:
        numbers, regions = ([getattr(one, name) for one in (self, other)] for name in ("numbers", "regions"))
        return Selected(self.joined, np.concatenate(numbers), np.concatenate(regions))

    @property
    def picture_keys(self) -> np.ndarray:
        return self.joined.picture_keys[self.numbers]


def unnamed(joined: Joined) -> Selected:
    """Return every mask of still pictures whose objects have no words, as a region with an empty caption."""
    counts = joined.unnamed
    numbers = np.repeat(np.arange(len(joined)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    return Selected(joined, numbers, (np.arange(len(numbers)) - firsts).astype(np.int32))


class Expressions(Lazy[list[str]]):
    """For every sample that is a region, the expressions that mean it: those with the same picture and
    exactly the same mask."""

    def __init__(self, samples: Sequence[Sample], joined: Joined) -> None:
        self._samples, self._joined = samples, joined
        referring = joined.where(lambda sample: sample.task == "referring")
        referring = referring[joined.things[referring] != b""]
        self._order = referring[np.argsort(joined.things[referring], kind="stable")]

    def __len__(self) -> int:
        return len(self._samples)

    def item(self, number: int) -> list[str]:
        sample = self._samples[number]
        if not is_region(sample):
            return []
        thing = np.array(digest_of_thing(picture_digest(sample), sample), dtype="S16")
        first, last = (
            bisect(self._order, thing, key=lambda place: self._joined.things[place])
            for bisect in (bisect_left, bisect_right)
        )
        return [self._joined[int(place)].text for place in self._order[first:last]]
