"""Frames of true and predicted objects with identities -> HOTA (Luiten et al. 2021) and its parts, as
TrackEval computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment

ALPHAS = np.arange(0.05, 0.99, 0.05)
"""The 19 overlaps at which a pair counts as a match."""
_EPS = float(np.finfo(float).eps)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The objects in a frame (numbered from 0), and their overlaps."""

    true: Sequence[int]
    predicted: Sequence[int]
    similarity: Float[np.ndarray, "N P"]


@dataclass(frozen=True, kw_only=True)
class Tracks:
    """Counts of one sequence, per alpha. Sequences are pooled by their true positives."""

    matched: Float[np.ndarray, " A"]
    missed: Float[np.ndarray, " A"]
    extra: Float[np.ndarray, " A"]
    overlap: Float[np.ndarray, " A"]
    """Summed over matches."""
    association: Float[np.ndarray, "3 A"]
    """AssA, AssRe, AssPr, each summed over matches."""


def tracks(frames: Sequence[Frame]) -> Tracks:
    true_frames, predicted_frames = _counts([f.true for f in frames]), _counts([f.predicted for f in frames])
    together = np.zeros((len(true_frames), len(predicted_frames)))
    for f in frames:
        union = f.similarity.sum(0)[None] + f.similarity.sum(1)[:, None] - f.similarity
        share = np.divide(f.similarity, union, out=np.zeros_like(union), where=union > _EPS)
        together[np.ix_(f.true, f.predicted)] += share
    alignment = together / np.maximum(true_frames[:, None] + predicted_frames[None] - together, _EPS)
    matches = np.zeros((len(ALPHAS), *together.shape))
    overlap = np.zeros(len(ALPHAS))
    for f in frames:
        true, predicted = np.array(f.true, int), np.array(f.predicted, int)
        rows, columns = linear_sum_assignment(-(alignment[np.ix_(true, predicted)] * f.similarity))
        similarities = f.similarity[rows, columns]
        for a, alpha in enumerate(ALPHAS):
            hit = similarities >= alpha - _EPS
            overlap[a] += similarities[hit].sum()
            matches[a, true[rows[hit]], predicted[columns[hit]]] += 1
    matched = matches.sum((1, 2))
    among = np.maximum(1, true_frames[:, None] + predicted_frames[None] - matches)
    shares = (among, np.maximum(1, true_frames)[None, :, None], np.maximum(1, predicted_frames)[None, None])
    return Tracks(
        matched=matched,
        missed=true_frames.sum() - matched,
        extra=predicted_frames.sum() - matched,
        overlap=overlap,
        association=np.stack([(matches * (matches / share)).sum((1, 2)) for share in shares]),
    )


def hota(sequences: Sequence[Tracks]) -> dict[str, float]:
    """Return means over alphas."""
    matched, missed, extra = (
        sum(getattr(s, key) for s in sequences) for key in ("matched", "missed", "extra")
    )
    pooled = np.maximum(1, matched)
    detection = matched / np.maximum(1, matched + missed + extra)
    recall, precision = matched / np.maximum(1, matched + missed), matched / np.maximum(1, matched + extra)
    association, association_recall, association_precision = sum(s.association for s in sequences) / pooled
    parts = {
        "HOTA": np.sqrt(detection * association),
        "DetA": detection,
        "AssA": association,
        "DetRe": recall,
        "DetPr": precision,
        "AssRe": association_recall,
        "AssPr": association_precision,
        "LocA": np.maximum(1e-10, sum(s.overlap for s in sequences)) / np.maximum(1e-10, matched),
        "OWTA": np.sqrt(recall * association),
    }
    return {key: float(np.mean(values)) for key, values in parts.items()}


def _counts(present: Sequence[Sequence[int]]) -> Float[np.ndarray, " n"]:
    """Count the frames in which each object is present."""
    ids = [i for frame in present for i in frame]
    return np.bincount(ids, minlength=max(ids, default=-1) + 1).astype(float)
