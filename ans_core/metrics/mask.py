"""Pairs of masks (boolean arrays or RLE) -> pixel counts, added up over samples and divided once: IoU, cIoU, gIoU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool
from pycocotools import mask as coco

from ans_core.types import RLE

Mask = RLE | Bool[np.ndarray, "H W"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Pixels in both masks, and in any of the two. Sums of Counts pool samples (cIoU)."""

    intersection: int = 0
    union: int = 0

    @property
    def iou(self) -> float:
        """Both masks empty = 1: nothing was asked for and nothing was drawn."""
        return self.intersection / self.union if self.union else 1.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(intersection=self.intersection + other.intersection, union=self.union + other.union)


def counts(prediction: Mask, truth: Mask) -> Counts:
    """Both as RLE or both as arrays, of one size (ValueError otherwise: COCO's own code would return garbage)."""
    if isinstance(prediction, dict) and isinstance(truth, dict):
        if list(prediction["size"]) != list(truth["size"]):
            raise ValueError(f"predicted mask of size {prediction['size']} against a true one of {truth['size']}; resize the prediction")
        both = int(coco.area(coco.merge([prediction, truth], intersect=True)))
        return Counts(intersection=both, union=int(coco.area(prediction)) + int(coco.area(truth)) - both)
    prediction, truth = np.asarray(prediction), np.asarray(truth)
    if prediction.shape != truth.shape or prediction.dtype != bool or truth.dtype != bool:
        raise ValueError(
            f"two boolean masks of one shape needed, got {prediction.dtype} {prediction.shape} and {truth.dtype} {truth.shape}"
        )
    return Counts(intersection=int((prediction & truth).sum()), union=int((prediction | truth).sum()))


def ciou(per_sample: Iterable[Counts]) -> float:
    """Cumulative IoU: all intersections over all unions, so large objects weigh more."""
    return sum(per_sample, start=Counts()).iou


def giou(per_sample: Iterable[Counts]) -> float:
    """Mean of the samples' IoUs (at least one sample)."""
    ious = [c.iou for c in per_sample]
    return sum(ious) / len(ious)
