"""IoU of pairs of masks: RLE as pixel counts that add up over samples (cIoU, gIoU), stacks of masks at once,
and masks of probabilities. Everywhere, two empty masks have IoU 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from pycocotools import mask as coco

from ans_core.types import RLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Pixels in both masks, and in at least one. Sums of Counts pool samples (cIoU)."""

    intersection: int = 0
    union: int = 0

    @property
    def iou(self) -> float:
        """Return the IoU; both masks empty = 1: nothing was asked for and nothing was predicted."""
        return self.intersection / self.union if self.union else 1.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(intersection=self.intersection + other.intersection, union=self.union + other.union)


def counts(prediction: RLE, truth: RLE) -> Counts:
    """Count pixels of two masks of one size (ValueError otherwise: COCO's own code would return garbage)."""
    if list(prediction["size"]) != list(truth["size"]):
        raise ValueError(
            f"predicted mask of size {prediction['size']} against a true one of {truth['size']}; resize the "
            "prediction"
        )
    both = int(coco.area(coco.merge([prediction, truth], intersect=True)))
    return Counts(intersection=both, union=int(coco.area(prediction)) + int(coco.area(truth)) - both)


def iou_matrix(masks: Sequence[RLE], others: Sequence[RLE]) -> Float[np.ndarray, "N M"]:
    """Return the IoU of every mask with every other one, from the run lengths; all of one size."""
    if not masks or not others:
        return np.zeros((len(masks), len(others)))
    if len(sizes := {tuple(m["size"]) for m in (*masks, *others)}) > 1:
        raise ValueError(f"masks of sizes {sorted(sizes)}; resize the predictions")
    ious = np.asarray(coco.iou(list(masks), list(others), [False] * len(others)))
    ious[np.ix_(coco.area(list(masks)) == 0, coco.area(list(others)) == 0)] = 1.0
    return ious


def mask_iou(masks: Bool[Any, "*batch H W"], truth: Bool[Any, "*batch H W"]) -> Float[Any, "*batch"]:
    """Return the IoU of every mask with its true one; NumPy arrays or tensors, of shapes that broadcast."""
    return _share((masks & truth).sum((-2, -1)), (masks | truth).sum((-2, -1)))


def soft_iou(probabilities: Float[Any, "*batch H W"], truth: Bool[Any, "*batch H W"]) -> Float[Any, "*batch"]:
    """Return sum(p t) / sum(p + t - p t): denser than `mask_iou` at low overlap, equal to it if every
    probability is 0 or 1."""
    intersection = (probabilities * truth).sum((-2, -1))
    return _share(intersection, (probabilities + truth).sum((-2, -1)) - intersection)


def pairwise_iou(
    masks: Bool[Any, "*batch N H W"], others: Bool[Any, "*batch M H W"]
) -> Float[Any, "*batch N M"]:
    """Return the IoU of every mask with every other one. Pixels are counted as integers because autocast
    would round a matrix product."""
    both = (masks[..., :, None, :, :] & others[..., None, :, :, :]).sum((-2, -1))
    return _share(both, masks.sum((-2, -1))[..., :, None] + others.sum((-2, -1))[..., None, :] - both)


def _share(intersection: Any, union: Any) -> Any:
    nothing = union == 0
    return (intersection + nothing) / (union + nothing)


def ciou(per_sample: Iterable[Counts]) -> float:
    """Return cumulative IoU: all intersections over all unions, so large objects weigh more."""
    return sum(per_sample, start=Counts()).iou


def giou(per_sample: Iterable[Counts]) -> float:
    """Return the mean of the samples' IoUs (at least one sample)."""
    ious = [c.iou for c in per_sample]
    return sum(ious) / len(ious)
