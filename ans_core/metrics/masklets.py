"""Masklets with scores (video noun-phrase segmentation, SA-Co/VEval) -> average precision, and how well
phrases are detected."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from pycocotools.cocoeval import COCOeval
from scipy.optimize import linear_sum_assignment

from ans_core.metrics.coco import figures as coco_figures
from ans_core.metrics.mask import Counts, counts
from ans_core.types import RLE

AVERAGE_PRECISIONS = ("AP", "AP50", "AP75")
THRESHOLDS = np.linspace(0.5, 0.95, 10)


def masklet_ious(
    predicted: Sequence[Sequence[RLE]], true: Sequence[Sequence[RLE]]
) -> Float[np.ndarray, "P N"]:
    """Return intersections summed over frames, divided by unions summed over frames. Two masklets empty
    everywhere = 1."""
    ious = np.zeros((len(predicted), len(true)))
    for i, ours in enumerate(predicted):
        for j, theirs in enumerate(true):
            ious[i, j] = sum(map(counts, ours, theirs), start=Counts()).iou
    return ious


@dataclass(frozen=True, kw_only=True)
class Group:
    """A phrase in a video: its predicted and true masklets."""

    scores: Sequence[float]
    ious: Float[np.ndarray, "P N"]


def average_precision(groups: Mapping[tuple[Hashable, Hashable], Group]) -> dict[str, float]:
    """Return COCO's AP, AP50, AP75 (101 recall points, 100 detections) with masklets instead of boxes; keys
    are (video, category), the mean is over categories that have a truth."""
    videos = {name: i for i, name in enumerate(dict.fromkeys(video for video, _ in groups))}
    categories = {
        name: i for i, name in enumerate(dict.fromkeys(category for _, category in groups), start=1)
    }
    common = {"bbox": [0, 0, 1, 1], "area": 1.0, "iscrowd": 0}
    truth: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    of_pair: dict[tuple[int, int], Group] = {}
    for (video, category), group in groups.items():
        place = {"image_id": videos[video], "category_id": categories[category], **common}
        truth += [place | {"id": len(truth) + 1 + n} for n in range(group.ious.shape[1])]
        results += [place | {"score": score} for score in group.scores]
        of_pair[videos[video], categories[category]] = group
    if not truth:
        return dict.fromkeys(AVERAGE_PRECISIONS, 0.0)

    class MaskletEval(COCOeval):
        def computeIoU(self, imgId: Any, catId: Any) -> Any:
            group = of_pair.get((imgId, catId))
            if group is None or not group.ious.size:
                return []
            order = np.argsort([-score for score in group.scores], kind="mergesort")
            return group.ious[order[: self.params.maxDets[-1]]]

    dataset = {
        "images": [{"id": i} for i in videos.values()],
        "categories": [{"id": i, "name": str(i)} for i in categories.values()],
        "annotations": truth,
    }
    figures = coco_figures(dataset, results, kind="bbox", evaluator=MaskletEval)
    return {key: figures[key] for key in AVERAGE_PRECISIONS}


def phrase_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Return SA-Co's cgF1 of predictions with a score of .5 or more. IL_MCC: Matthews coefficient of "the
    phrase is there"; positive_micro_F1: matches (Hungarian, on IoU) over all phrases with a truth; cgF1:
    their product. At IoU .5, .75 and as the mean over .5 to .95."""
    hits, predicted, true = np.zeros(len(THRESHOLDS)), 0, 0
    table = np.zeros((2, 2))
    for group in groups:
        ious = group.ious[[score >= 0.5 for score in group.scores]]
        table[int(ious.shape[1] > 0), int(ious.shape[0] > 0)] += 1
        if ious.shape[1]:
            matched = ious[linear_sum_assignment(-ious)]
            hits += (matched[None] >= THRESHOLDS[:, None]).sum(1)
            predicted += ious.shape[0]
            true += ious.shape[1]
    precision, recall = hits / (predicted + 1e-4), hits / (true + 1e-4)
    f1 = 2 * precision * recall / (precision + recall + 1e-4)
    (tn, fp), (fn, tp) = table.tolist()
    mcc = (tp * tn - fp * fn) / (math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) + 1e-6)
    figures = {"IL_MCC": mcc}
    for name, which in (("", slice(None)), ("_50", slice(0, 1)), ("_75", slice(5, 6))):
        figures[f"cgF1{name}"] = float((f1[which] * mcc).mean())
        figures[f"positive_micro_F1{name}"] = float(f1[which].mean())
        figures[f"precision{name}"], figures[f"recall{name}"] = (
            float(precision[which].mean()),
            float(recall[which].mean()),
        )
    return figures
