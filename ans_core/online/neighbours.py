"""Vectors of experiences -> the most similar ones: an exact search over hybrid vectors, .7 of what is seen
and .3 of what is asked."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from jaxtyping import Float, Int

from ans_core.online.store import Store

VISUAL, TEXT = 0.7, 0.3


def hybrid(visual: Float[np.ndarray, " D"], text: Float[np.ndarray, " E"]) -> Float[np.ndarray, " K"]:
    """Concatenate [sqrt(.7) v / |v|, sqrt(.3) t / |t|]: two have the inner product .7 cos(v, v') + .3 cos(t,
    t')."""

    def unit(values: Float[np.ndarray, " D"]) -> Float[np.ndarray, " D"]:
        return np.asarray(values, np.float32) / max(float(np.linalg.norm(values)), 1e-12)

    return np.concatenate([np.sqrt(VISUAL) * unit(visual), np.sqrt(TEXT) * unit(text)]).astype(np.float32)


class Neighbours:
    """The vectors of a store in memory. `follow` brings it up to date."""

    def __init__(self) -> None:
        self._ids: Int[np.ndarray, " N"] = np.zeros(0, np.int64)
        self._matrix: Float[np.ndarray, "N D"] = np.zeros((0, 0), np.float32)
        self._used = 0
        """Rows of the matrix that hold a vector; the rest is room for more."""

    def __len__(self) -> int:
        return self._used

    def add(self, ids: Int[np.ndarray, " M"], vectors: Float[np.ndarray, "M D"]) -> None:
        if not len(ids):
            return
        need = self._used + len(ids)
        if need > len(self._matrix):
            room = max(need, 2 * len(self._matrix), 64)
            matrix, numbers = np.zeros((room, vectors.shape[1]), np.float32), np.zeros(room, np.int64)
            if self._used:
                matrix[: self._used], numbers[: self._used] = (
                    self._matrix[: self._used],
                    self._ids[: self._used],
                )
            self._matrix, self._ids = matrix, numbers
        self._matrix[self._used : need], self._ids[self._used : need] = vectors, ids
        self._used = need

    def keep(self, ids: Collection[int]) -> None:
        """Drop all others; their vectors are overwritten."""
        retained = np.isin(self._ids[: self._used], np.fromiter(ids, np.int64, len(ids)))
        count = int(retained.sum())
        if count < self._used:
            self._matrix[:count], self._ids[:count] = (
                self._matrix[: self._used][retained],
                self._ids[: self._used][retained],
            )
            self._matrix[count:], self._ids[count:] = 0, 0
            self._used = count

    def follow(self, store: Store) -> None:
        """Take new experiences of the store in, and drop what it has no more. Ids only rise, so the newest
        one tells what is new."""
        newest = int(self._ids[: self._used].max(initial=0))
        self.add(*store.vectors(newest))
        if store.size() != len(self):
            self.keep(store.ids())

    def vector(self, number: int) -> Float[np.ndarray, " D"] | None:
        """Return the vector of an experience; None if it is unknown."""
        (places,) = np.nonzero(self._ids[: self._used] == number)
        return self._matrix[places[0]] if len(places) else None

    def search(self, vector: Float[np.ndarray, " D"], count: int) -> list[tuple[int, float]]:
        """Return (id, similarity in [-1, 1]) of the `count` nearest, nearest first."""
        if not self._used:
            return []
        similar = self._matrix[: self._used] @ vector
        count = min(count, self._used)
        best = np.argpartition(similar, -count)[-count:]
        best = best[np.argsort(-similar[best], kind="stable")]
        return [(int(self._ids[i]), float(similar[i])) for i in best]
