"""A predicted mask -> its confidence: the mean probability of foreground inside it.

With `iou` this is the shaped reward alpha * IoU + beta * confidence; alone it rewards any mask with confident
pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

from ans_core.types import Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskPrediction(Prediction):
    """An answer with known mask probabilities."""

    confidence: float = 1.0
    """Mean over the mask's pixels, 0.5 to 1; 0 for an empty mask."""
    soft_iou: float | None = None
    """Soft IoU of the probabilities with the true mask."""


def confidence(answer: Prediction, truth: Prediction) -> float:
    """Return the confidence; 1 for an answer without known probabilities (the truth, a given mask)."""
    return answer.confidence if isinstance(answer, MaskPrediction) else 1.0
