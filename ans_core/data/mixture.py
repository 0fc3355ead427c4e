"""Mix samples of many data sets into the rows of every training step, decided by (seed, step) alone."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

import numpy as np
from jaxtyping import Bool, Int

from ans_core.data.collate import Row
from ans_core.data.conversation import Turn
from ans_core.data.index import by_picture, picture_keys, tasks
from ans_core.dist import in_epochs, own_share, rng_of, seed_of
from ans_core.types import Sample

MakeTurn = Callable[[Sample, Random], Turn]

BLOCK = 64
"""Number of rows within which the pools have their exact shares, in shuffled order."""
UNPAIRED = (b"tracking", b"phrase")
"""Tasks of masks without a text (SAM2's memory and loop 1 of RL learn from them), and of texts without a mask
(loop 2 does)."""


def paired(samples: Sequence[Sample]) -> Bool[np.ndarray, " samples"]:
    """Tell which samples have both a text and what it is about, so that SFT can learn from them."""
    return ~np.isin(tasks(samples), UNPAIRED)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set of a mixture."""

    name: str
    kind: str
    samples: Sequence[Sample]
    repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Images (or clips) of some data sets: number i has the samples `samples[starts[i] : starts[i + 1]]` of
    the mixture."""

    datasets: tuple[str, ...]
    samples: Int[np.ndarray, " samples"]
    starts: Int[np.ndarray, " bounds"]

    @property
    def images(self) -> int:
        return len(self.starts) - 1

    def of_image(self, number: int) -> list[int]:
        numbers: list[int] = self.samples[self.starts[number] : self.starts[number + 1]].tolist()
        return numbers


@dataclass(frozen=True, kw_only=True)
class PoolRows:
    """How many rows a run takes from one pool."""

    name: str
    datasets: tuple[str, ...]
    images: int
    samples: int
    rows: int

    @property
    def epochs(self) -> float:
        return self.rows / self.images


class Mixture:
    """Pools of images (or clips) with all questions about them. A row is one image of one pool, in shuffled
    epochs, with up to `questions` questions about it; the image is encoded once for all of them.

    Pools: the drawn images (their kinds share rows and compete for questions), the drawn clips, and each of
    the user's data sets (kind `extra`) by itself. A user's data set has the share `shares[name]`; those
    without one divide `shares["extra"]` in proportion to images x repeats, as upstream concatenates data
    sets, so that their epochs are in the ratio of the repeats.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        shares: Mapping[str, float],
        *,
        questions: int,
        frames: int,
        seed: int,
        turn: MakeTurn,
    ) -> None:
        """Build the pools. Raises ValueError if nothing is left to train on."""
        self.questions, self.frames, self.seed, self.turn = questions, frames, seed, turn
        self.kind_shares: dict[str, float] = {}
        self._sources: list[tuple[str, Sequence[Sample]]] = []
        self._firsts: list[int] = []
        datasets: dict[str, list[str]] = defaultdict(list)
        numbers: dict[str, list[np.ndarray]] = defaultdict(list)
        keys: dict[str, list[np.ndarray]] = defaultdict(list)
        weights: dict[str, dict[str, float]] = defaultdict(dict)
        repeats: dict[str, int] = {}
        count = 0
        for source in sources:
            is_extra = source.kind == "extra"
            share = shares.get(source.name, shares.get(source.kind, 0.0))
            usable = np.flatnonzero(paired(source.samples))
            if share and not len(usable) and source.name in shares:
                raise ValueError(
                    f"{source.name!r} has a share of the mixture, and no sample of it has both a text and "
                    "what it is about"
                )
            if not share or not len(usable):
                continue
            pool = source.name if is_extra else "clips" if source.kind == "video" else "images"
            kind = source.name if is_extra else source.kind
            self.kind_shares[kind] = weights[pool][kind] = share
            if is_extra and source.name not in shares:
                repeats[pool] = source.repeats
            datasets[pool].append(source.name)
            numbers[pool].append(count + usable)
            keys[pool].append(picture_keys(source.samples)[usable])
            self._sources.append((kind, source.samples))
            self._firsts.append(count)
            count += len(source.samples)
        if not datasets:
            raise ValueError(
                f"the mixture {dict(shares)} gives no share to any of the data sets "
                f"{[(s.name, s.kind) for s in sources]}"
            )
        self.pools = {
            pool: _pool(names, np.concatenate(numbers[pool]), np.concatenate(keys[pool]))
            for pool, names in datasets.items()
        }
        sizes = {pool: count * self.pools[pool].images for pool, count in repeats.items()}
        exact = {pool: sum(map(Fraction, kinds.values()), Fraction(0)) for pool, kinds in weights.items()}
        exact |= {
            pool: Fraction(shares["extra"]) * size / sum(sizes.values()) for pool, size in sizes.items()
        }
        self.shares = [exact[pool] / sum(exact.values()) for pool in self.pools]
        self.epoch = sum(repeats.get(name, 1) * pool.images for name, pool in self.pools.items())
        """Rows of one pass over all data, a set with `repeats` that often; where every set is of kind
        `extra`, it is upstream's epoch."""
        self._block: tuple[int, list[int], list[int]] = (-1, [], [])

    def rows(self, step: int, micro: int, *, batch: int, micros: int) -> list[Row]:
        """Return this process's rows of micro-batch `micro` of `micros` of optimizer step `step`; `batch`
        counts rows over all processes and micro-batches."""
        mine = own_share(range(step * batch, (step + 1) * batch), micro=micro, micros=micros)
        return [self.row(number) for number in mine]

    def row(self, number: int) -> Row:
        """Return row `number` of the run."""
        rng = rng_of(self.seed, "row", number)
        name, of_pool = self._place(number)
        pool = self.pools[name]
        image = in_epochs(of_pool, pool.images, self.seed, "epoch", name)
        chosen = self._choose(pool.of_image(image), rng)
        frames: tuple[int, ...] = (0,)
        length = len(chosen[0].frames)
        if chosen[0].stills:
            frames = tuple(range(length))
        elif length > 1:
            frames = tuple(sorted(rng.sample(range(length), min(self.frames, length))))
        where = f"{chosen[0].dataset}/{chosen[0].image_id}"
        turns = tuple(self.turn(s, rng) for s in chosen)
        if any(turn.regions for turn in turns):
            frames = (0, *frames[1:])  # regions are marked in the first frame
        refs = tuple(chosen[0].frames[f] for f in frames)
        size = (chosen[0].height, chosen[0].width)
        return Row(
            name=where,
            frames=refs,
            turns=turns,
            mask_frames=frames,
            seed=seed_of(self.seed, "points", number),
            size=size,
            stills=chosen[0].stills,
        )

    def table(self, rows: int) -> list[PoolRows]:
        """Return what the first `rows` rows take from every pool."""
        in_blocks = rows // BLOCK * BLOCK
        counts = dict(zip(self.pools, apportion(self.shares, in_blocks), strict=True))
        for number in range(in_blocks, rows):
            counts[self._place(number)[0]] += 1
        return [
            PoolRows(
                name=name,
                datasets=pool.datasets,
                images=pool.images,
                samples=len(pool.samples),
                rows=counts[name],
            )
            for name, pool in self.pools.items()
        ]

    def _place(self, number: int) -> tuple[str, int]:
        """Return (pool of a row, number of earlier rows from that pool)."""
        block, place = divmod(number, BLOCK)
        if self._block[0] != block:
            before, after = apportion(self.shares, block * BLOCK), apportion(self.shares, (block + 1) * BLOCK)
            order = [pool for pool in range(len(before)) for _ in range(after[pool] - before[pool])]
            rng_of(self.seed, "pools", block).shuffle(order)
            self._block = (block, before, order)
        _, before, order = self._block
        pool = order[place]
        return list(self.pools)[pool], before[pool] + order[:place].count(pool)

    def _choose(self, numbers: Sequence[int], rng: Random) -> list[Sample]:
        """Choose up to `questions` different samples of one image: first a kind by its share, then a sample
        of it."""
        by_kind: dict[str, list[int]] = {}
        for number in numbers:
            by_kind.setdefault(self._sources[self._source(number)][0], []).append(number)
        left = {kind: rng.sample(some, len(some)) for kind, some in by_kind.items()}
        chosen: list[int] = []
        while left and len(chosen) < self.questions:
            kind = rng.choices(list(left), weights=[self.kind_shares[k] for k in left])[0]
            chosen.append(left[kind].pop())
            if not left[kind]:
                del left[kind]
        return [self._sample(number) for number in chosen]

    def _source(self, number: int) -> int:
        return bisect_right(self._firsts, number) - 1

    def _sample(self, number: int) -> Sample:
        source = self._source(number)
        return self._sources[source][1][number - self._firsts[source]]


def _pool(names: Sequence[str], numbers: Int[np.ndarray, " samples"], keys: np.ndarray) -> Pool:
    order, starts = by_picture(keys)
    return Pool(datasets=tuple(names), samples=numbers[order], starts=starts)


def apportion(shares: Sequence[Fraction], rows: int) -> list[int]:
    """Return how many of the first `rows` rows each share gets (shares add up to 1). This is Webster's
    method: it gives out rows one by one, each to the share with the smallest (own rows + 1/2) / share. So no
    count falls as `rows` grows, and each stays close to rows x share."""
    start = max(Fraction(rows) - Fraction(len(shares), 2), Fraction(0))
    # rounded, these add up to at most `rows`
    counts = [int(start * share + Fraction(1, 2)) for share in shares]
    for _ in range(rows - sum(counts)):
        counts[min(range(len(shares)), key=lambda i: (counts[i] + Fraction(1, 2)) / shares[i])] += 1
    return counts
