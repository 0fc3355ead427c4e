"""COCO's box detection: boxes with categories and scores -> box AP and AR, pycocotools' twelve figures.

--predictions: COCO's results {"image_id", "category_id", "bbox": [x, y, width, height], "score"}; an image
without one got no box.
--data: a file of COCO instances.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ans_core.benchmarks.public import files, gcg
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent


def score(inputs: Inputs) -> Scored:
    assert inputs.data is not None
    truth, images = gcg.read_truth(inputs.data)
    for number, annotation in enumerate(truth["annotations"]):
        _check_box(annotation, f"{inputs.data}, annotation {number}")
    where, results = str(inputs.predictions), files.records(inputs.predictions)
    for number, record in enumerate(results):
        _check_box(record, f"{where}, record {number}")
        for key in ("category_id", "score"):
            files.number(record, key, where=f"{where}, record {number}")
    predicted = Counter(str(record["image_id"]) for record in results)
    files.refuse_unknown(predicted, images, where=inputs.predictions, what="images")
    true = Counter(str(a["image_id"]) for a in truth["annotations"] if not a["iscrowd"])
    if not true:
        raise ValueError(f"{inputs.data}: no true box")
    metrics = gcg.coco_figures(truth, results, iou_type="bbox")
    return Scored(
        metrics=metrics | {"images": len(images), "true_boxes": true.total(), "boxes": len(results)},
        published={key: percent(metrics[key]) for key in ("AP", "AP50", "AP75")},
        samples=[{"image_id": image, "boxes": predicted[image], "true": true[image]} for image in images],
        notes=[
            "pycocotools' figures: crowd regions are ignored, 100 boxes an image count",
            "no interval: AP is of all images at once",
        ],
    )


def _check_box(record: Any, where: str) -> None:
    """Raise ValueError for what is no [x, y, width, height] of an image."""
    files.value(record, "image_id", where=where)
    box = files.listed(record, "bbox", where=where)
    if (
        len(box) != 4
        or not all(type(n) in (int, float) and math.isfinite(n) for n in box)
        or min(box[2:]) < 0
    ):
        raise ValueError(f"{where}: bbox {box} is no [x, y, width, height] in pixels")


SCORER = Scorer(score=score, data="a file of COCO instances", sample_id=("image_id",))
