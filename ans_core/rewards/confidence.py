"""A drawn mask -> how sure its pixels are: the mean probability of foreground inside it. With `iou` beside it this is the shaped reward
alpha * IoU + beta * confidence; alone it is earned by any mask that is sure of itself."""

from __future__ import annotations

from dataclasses import dataclass

from ans_core.types import Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskPrediction(Prediction):
    """An answer whose masks' probabilities are known."""

    confidence: float = 1.0
    """Mean over the drawn pixels, 0.5 to 1; 0 where nothing is drawn."""
    soft_iou: float | None = None
    """Of the probabilities with the true mask."""


def confidence(answer: Prediction, truth: Prediction) -> float:
    """Of an answer without known probabilities (the truth, a mask given) 1."""
    return answer.confidence if isinstance(answer, MaskPrediction) else 1.0
