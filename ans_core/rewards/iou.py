"""Predicted and true masks -> mean IoU in [0, 1], hard (pixels) or soft (probabilities)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ans_core.metrics.mask import Counts, counts
from ans_core.rewards.confidence import MaskPrediction
from ans_core.types import Prediction


def iou(answer: Prediction, truth: Prediction) -> float:
    """Compare object i with object i, pixels pooled over its frames, and average over objects. A missing or extra mask counts 0. No object
    asked for and none predicted = 1; so is an empty mask if the true one is empty."""
    slots = max(len(answer.masks), len(truth.masks))
    if not slots:
        return 1.0
    total = 0.0
    for drawn, real in zip(answer.masks, truth.masks, strict=False):
        pooled = [counts(d, r) for d, r in zip(drawn, real, strict=True) if d is not None and r is not None]
        total += sum(pooled, start=Counts()).iou
    return total / slots


def soft(answer: Prediction, truth: Prediction) -> float:
    """Return `soft_iou` of an answer with known probabilities; for a given mask, whose pixels are 0 or 1, the hard IoU."""
    known = answer.soft_iou if isinstance(answer, MaskPrediction) else None
    return iou(answer, truth) if known is None else known


def hard_iou(masks: Bool[Tensor, "*batch H W"], truth: Bool[Tensor, "*batch H W"]) -> Float[Tensor, "*batch"]:
    """Return the IoU per mask; both empty = 1. The same number as `iou`, on tensors."""
    intersection, union = (masks & truth).sum((-2, -1)), (masks | truth).sum((-2, -1))
    return torch.where(union > 0, intersection / union.clamp(min=1), 1.0)


def soft_iou(probabilities: Float[Tensor, "*batch H W"], truth: Bool[Tensor, "*batch H W"]) -> Float[Tensor, "*batch"]:
    """Return sum(p t) / sum(p + t - p t): denser than the hard IoU at low overlap, equal to it if every probability is 0 or 1."""
    target = truth.to(probabilities.dtype)
    intersection = (probabilities * target).sum((-2, -1))
    union = (probabilities + target).sum((-2, -1)) - intersection
    return torch.where(union > 0, intersection / union.clamp(min=torch.finfo(union.dtype).tiny), 1.0)
