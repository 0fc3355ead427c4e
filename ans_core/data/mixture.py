"""Samples of many data sets -> the rows of every training step, decided by (seed, step) alone."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ans_core.data.collate import Row
from ans_core.data.conversation import Turn
from ans_core.dist import rank, rng_of, seed_of, world_size
from ans_core.types import Sample

MakeTurn = Callable[[Sample, Random], Turn]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set of a mixture."""

    name: str
    kind: str
    samples: Sequence[Sample]
    repeats: int = 1


class Mixture:
    """Pools of images (or clips) with everything that is asked about them; a row draws a pool by its share, an image in shuffled epochs,
    and up to `questions` questions about it, which the image is encoded once for.

    Pools: the drawn images (their kinds share rows and compete for questions), the drawn clips, and every data set of the user's
    (kind `extra`) by itself, with the share `shares[name]`, else `shares["extra"] * repeats`.
    """

    def __init__(
        self, sources: Sequence[Source], shares: Mapping[str, float], *, questions: int, frames: int, seed: int, turn: MakeTurn
    ) -> None:
        """Raises ValueError when nothing is left to draw from."""
        self.questions, self.frames, self.seed, self.turn = questions, frames, seed, turn
        self.kind_shares: dict[str, float] = {}
        grouped: dict[str, dict[object, dict[str, list[Sample]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        weights: dict[str, float] = {}
        for source in sources:
            share = shares.get(source.name, shares.get(source.kind, 0.0))
            if not share or not source.samples:
                continue
            pool = source.name if source.kind == "extra" else "clips" if source.kind == "video" else "images"
            kind = source.name if source.kind == "extra" else source.kind
            self.kind_shares[kind] = share
            weights[pool] = (
                share * (source.repeats if source.kind == "extra" and source.name not in shares else 1)
                if pool != "images"
                else sum(self.kind_shares.get(k, 0.0) for k in ("referring", "region_caption", "grounded_caption"))
            )
            for sample in source.samples:
                grouped[pool][picture_key(sample)][kind].append(sample)
        if not grouped:
            raise ValueError(f"the mixture {dict(shares)} gives no share to any of the data sets {[(s.name, s.kind) for s in sources]}")
        self.pools = {name: list(images.values()) for name, images in grouped.items()}
        self.weights = [weights[name] for name in self.pools]
        self._orders: dict[str, tuple[int, list[int]]] = {}

    def rows(self, step: int, micro: int, *, batch: int, micros: int) -> list[Row]:
        """This process's rows of micro-batch `micro` of `micros` of optimizer step `step`; a batch is `batch` rows over all of them."""
        first = step * batch
        mine = range(first, first + batch)[micro * world_size() + rank() :: micros * world_size()]
        return [self.row(number) for number in mine]

    def row(self, number: int) -> Row:
        """Row `number` of the run."""
        rng = rng_of(self.seed, "row", number)
        name = rng.choices(list(self.pools), weights=self.weights)[0]
        pool = self.pools[name]
        epoch, place = divmod(number, len(pool))
        chosen = self._choose(pool[self._order(name, epoch)[place]], rng)
        frames: tuple[int, ...] = (0,)
        length = len(chosen[0].frames)
        if length > 1:
            frames = tuple(sorted(rng.sample(range(length), min(self.frames, length))))
        refs = tuple(chosen[0].frames[f] for f in frames)
        where = f"{chosen[0].dataset}/{chosen[0].image_id}"
        turns = tuple(self.turn(s, rng) for s in chosen)
        return Row(name=where, frames=refs, turns=turns, mask_frames=frames, seed=seed_of(self.seed, "points", number))

    def _order(self, pool: str, epoch: int) -> list[int]:
        """The permutation of an epoch, kept while it lasts."""
        if self._orders.get(pool, (-1, []))[0] != epoch:
            indices = list(range(len(self.pools[pool])))
            rng_of(self.seed, "epoch", pool, epoch).shuffle(indices)
            self._orders[pool] = (epoch, indices)
        return self._orders[pool][1]

    def _choose(self, by_kind: dict[str, list[Sample]], rng: Random) -> list[Sample]:
        """Up to `questions` different samples of one image: a kind by its share, then a sample of it."""
        left = {kind: rng.sample(rows, len(rows)) for kind, rows in by_kind.items()}
        chosen: list[Sample] = []
        while left and len(chosen) < self.questions:
            kind = rng.choices(list(left), weights=[self.kind_shares[k] for k in left])[0]
            chosen.append(left[kind].pop())
            if not left[kind]:
                del left[kind]
        return chosen


def picture_key(sample: Sample) -> tuple[object, ...]:
    """The pictures themselves: data sets that show the same files share rows."""
    return tuple(Path(os.path.normpath(ref)) if isinstance(ref, Path) else ref for ref in sample.frames)
