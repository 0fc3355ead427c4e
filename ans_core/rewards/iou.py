"""Predicted and true masks -> mean IoU in [0, 1], hard (pixels) or soft (probabilities)."""

from __future__ import annotations

from ans_core.metrics.mask import Counts, counts
from ans_core.rewards.confidence import MaskPrediction
from ans_core.types import Prediction


def iou(answer: Prediction, truth: Prediction) -> float:
    """Compare object i with object i, pixels pooled over its frames, and average over objects. A missing or
    extra mask counts 0. No object asked for and none predicted = 1; so is an empty mask if the true one is
    empty."""
    slots = max(len(answer.masks), len(truth.masks))
    if not slots:
        return 1.0
    total = 0.0
    for predicted, real in zip(answer.masks, truth.masks, strict=False):
        pooled = [
            counts(d, r) for d, r in zip(predicted, real, strict=True) if d is not None and r is not None
        ]
        total += sum(pooled, start=Counts()).iou
    return total / slots


def soft(answer: Prediction, truth: Prediction) -> float:
    """Return `soft_iou` of an answer with known probabilities; for a given mask, whose pixels are 0 or 1, the
    hard IoU."""
    soft_iou = answer.soft_iou if isinstance(answer, MaskPrediction) else None
    return iou(answer, truth) if soft_iou is None else soft_iou
