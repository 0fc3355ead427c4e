"""Pixel counts of every expression -> the metrics of RefCOCO, gRefCOCO and ReasonSeg, each as its public
scorer defines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ans_core.metrics.mask import Counts, ciou, counts, giou
from ans_core.types import RLE

ABOVE = (0.7, 0.8, 0.9)
"""ReLA's thresholds of P@."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of one expression."""

    counts: Counts
    meant: bool
    """The true mask has pixels."""
    predicted: bool
    """The predicted mask has pixels."""
    answered: bool = True
    """A mask was predicted, if only an empty one."""


def answer(prediction: RLE, truth: RLE, *, answered: bool = True) -> Answer:
    pixels = counts(prediction, truth)
    nothing = counts(truth, truth).union
    predicted = pixels.union + pixels.intersection > nothing
    return Answer(counts=pixels, meant=nothing > 0, predicted=predicted, answered=answered)


def shares_above(answers: Sequence[Answer], thresholds: Sequence[float]) -> dict[str, float]:
    """Return `P@0.5` and so on: the share of expressions with a target whose IoU is at least .5."""
    ious = [a.counts.iou for a in answers if a.meant]
    return {f"P@{t:g}": sum(iou >= t for iou in ious) / len(ious) for t in thresholds} if ious else {}


def grefcoco(answers: Sequence[Answer]) -> dict[str, float]:
    """Return ReLA's metrics. gIoU and cIoU over all (nothing meant: IoU 1 if nothing is predicted, else 0 and
    the predicted pixels go into the union); N_acc, T_acc: the share of expressions without / with a target
    answered with an empty / non-empty mask; P@ over those with one."""
    metrics = {"gIoU": giou(a.counts for a in answers), "cIoU": ciou(a.counts for a in answers)}
    return metrics | target_accuracies(answers) | shares_above(answers, ABOVE)


def target_accuracies(answers: Sequence[Answer]) -> dict[str, float]:
    """Return ReLA's N_acc and T_acc; one that nothing speaks for is left out."""
    metrics = {}
    for name, target in (("N_acc", False), ("T_acc", True)):
        if right := [a.predicted == target for a in answers if a.meant == target]:
            metrics[name] = sum(right) / len(right)
    return metrics


def reasonseg(answers: Sequence[Answer]) -> dict[str, float]:
    """Return LISA's metrics; its small constants lower them by less than 1e-5."""
    ious = [a.counts.intersection / (a.counts.union + 1e-5) + (a.counts.union == 0) for a in answers]
    pooled = sum((a.counts for a in answers), start=Counts())
    return {"gIoU": sum(ious) / (len(ious) + 1e-5), "cIoU": pooled.intersection / (pooled.union + 1e-10)}
