"""Compare an answer's phrases and masks with the true ones (grounded conversation, GCG): mIoU and recall."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ans_core.metrics.mask import iou_matrix
from ans_core.metrics.meteor import words
from ans_core.types import RLE

PIECE = re.compile(r"<p>((?:(?!<p>|\[SEG\]).)*)</p>|(\[SEG\])", re.DOTALL)
"""A phrase, or a `[SEG]`. A `<p>` that is never closed (models write this) is no phrase and hides no
`[SEG]`."""
_MARKUP = re.compile(r"<[^<>]*>|\[SEG\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grounded:
    """The matches of one image. Sums over images use these counts."""

    ious: tuple[float, ...]
    """IoUs of the pairs matched one to one, best first, overlap > 0 only."""
    recalled: int
    """True phrases found: IoU >= .5 and phrase similarity >= .5."""
    true: int
    predicted: int

    @property
    def miou(self) -> float:
        """Return GranD-f's mIoU of one image: mean over MATCHED pairs, so missed objects and extra masks cost
        nothing; 0 without a match. Unlike the public scorer: nothing to find and nothing predicted = 1."""
        if not self.true and not self.predicted:
            return 1.0
        return sum(self.ious) / len(self.ious) if self.ious else 0.0

    @property
    def miou_all(self) -> float:
        """Return the mIoU in which missed objects and extra masks count 0."""
        slots = max(self.true, self.predicted)
        return sum(self.ious) / slots if slots else 1.0


def plain_caption(text: str) -> str:
    """Remove `<p>` tags and `[SEG]`, as the public scorer strips an answer."""
    return re.sub(r"\s+([.,;])", r"\1", " ".join(_MARKUP.sub(" ", text).split()))


def phrases(text: str) -> list[str]:
    """Return one phrase per `[SEG]`, in order: the last `<p> .. </p>` before it that no earlier `[SEG]` has
    taken, else ""."""
    per_mask: list[str] = []
    waiting = ""
    for piece in PIECE.finditer(text):
        if piece[2]:
            per_mask.append(waiting)
            waiting = ""
        else:
            waiting = " ".join(piece[1].split())
    return per_mask


def token_f1(one: str, other: str) -> float:
    """Return the share of common words. It replaces the public scorer's BERT cosine, which needs downloaded
    weights: recalls computed with it are named `recall_token_f1` and are not the benchmark's number."""
    a, b = Counter(words(one)), Counter(words(other))
    common = (a & b).total()
    return 2 * common / (a.total() + b.total()) if common else 0.0


def ground(
    *,
    drawn: Sequence[RLE],
    drawn_phrases: Sequence[str],
    true: Sequence[RLE],
    true_phrases: Sequence[str],
    similarity: Callable[[str, str], float] = token_f1,
) -> Grounded:
    """Match masks greedily one to one by IoU. As in the public scorer, recall goes through the pairs from the
    best down and stops at the first failure."""
    if len(drawn) != len(drawn_phrases) or len(true) != len(true_phrases):
        raise ValueError(
            f"{len(drawn)} masks, {len(drawn_phrases)} phrases drawn; {len(true)} masks, "
            f"{len(true_phrases)} phrases true"
        )
    ious = iou_matrix(drawn, true)
    pairs = best_pairs(ious)
    recalled = recalled_pairs(ious, lambda i, j: similarity(drawn_phrases[i], true_phrases[j]))
    return Grounded(
        ious=tuple(iou for _, _, iou in pairs), recalled=recalled, true=len(true), predicted=len(drawn)
    )


def recalled_pairs(ious: Float[np.ndarray, "P N"], similarity: Callable[[int, int], float]) -> int:
    """Count the true phrases found: go through the pairs from the best down and stop at the first with IoU or
    similarity (drawn, true) below .5. Of equal IoUs the first true mask's goes first, as in GLaMM's code."""
    recalled = 0
    for j, i, iou in best_pairs(ious.T):
        if iou < 0.5 or similarity(i, j) < 0.5:
            break
        recalled += 1
    return recalled


def best_pairs(ious: Float[np.ndarray, "P N"]) -> list[tuple[int, int, float]]:
    """Return (row, column, IoU) from the best pair down, each mask once, until nothing overlaps. Ties: the
    first in reading order."""
    free = ious.copy()
    pairs = []
    while free.size and free.max() > 0:
        i, j = np.unravel_index(free.argmax(), free.shape)
        pairs.append((int(i), int(j), float(free[i, j])))
        free[i, :], free[:, j] = 0, 0
    return pairs
