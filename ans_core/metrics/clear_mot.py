"""Frames of true and predicted objects with identities -> MOTA, MOTP and identity switches (Bernardin &
Stiefelhagen 2008), as TrackEval computes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from ans_core.metrics.hota import Frame

THRESHOLD = 0.5
"""Overlap from which a pair can match."""
_EPS = float(np.finfo(float).eps)


@dataclass(frozen=True, kw_only=True)
class ClearCounts:
    """Counts of sequences, added up over them. `switches`: matches of a true object with another identity
    than at its match before."""

    matched: int = 0
    missed: int = 0
    extra: int = 0
    switches: int = 0
    overlap: float = 0.0
    """Summed over matches."""

    def __add__(self, other: ClearCounts) -> ClearCounts:
        return ClearCounts(
            matched=self.matched + other.matched,
            missed=self.missed + other.missed,
            extra=self.extra + other.extra,
            switches=self.switches + other.switches,
            overlap=self.overlap + other.overlap,
        )


def clear_counts(frames: Sequence[Frame]) -> ClearCounts:
    """Count one sequence. A pair of the frame before stays together while it overlaps by THRESHOLD, even if
    another pair overlaps more; the others are assigned by most overlap."""
    total = ClearCounts()
    last_match: dict[int, int] = {}
    """True object -> identity of its last match."""
    before: dict[int, int] = {}
    for frame in frames:
        continued = np.array(
            [[before.get(true) == predicted for predicted in frame.predicted] for true in frame.true], bool
        ).reshape(frame.similarity.shape)
        score = np.where(
            frame.similarity >= THRESHOLD - _EPS, frame.similarity + len(frame.true) * continued, 0
        )
        pairs = [
            (row, column)
            for row, column in zip(*linear_sum_assignment(-score), strict=True)
            if score[row, column] > 0
        ]
        matches = {frame.true[row]: frame.predicted[column] for row, column in pairs}
        total += ClearCounts(
            matched=len(pairs),
            missed=len(frame.true) - len(pairs),
            extra=len(frame.predicted) - len(pairs),
            switches=sum(last_match.get(true, predicted) != predicted for true, predicted in matches.items()),
            overlap=float(sum(frame.similarity[row, column] for row, column in pairs)),
        )
        last_match |= matches
        if continued.size:  # a frame without objects on one side ends no pair
            before = matches
    return total


def clear_mot(sequences: Iterable[ClearCounts]) -> dict[str, float]:
    """Return MOTA (1 - errors / true objects of all frames; below 0 where there are more errors than
    objects), MOTP (mean overlap of matches; 0 without one) and the number of identity switches."""
    total = sum(sequences, start=ClearCounts())
    objects = total.matched + total.missed
    return {
        "MOTA": (total.matched - total.extra - total.switches) / max(1, objects),
        "MOTP": total.overlap / max(1, total.matched),
        "ID_switches": float(total.switches),
    }
