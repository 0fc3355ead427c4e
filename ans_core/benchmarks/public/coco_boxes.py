"""COCO's box detection: boxes with categories and scores -> box AP and AR, pycocotools' twelve figures.

--predictions: COCO's results {"image_id", "category_id", "bbox": [x, y, width, height], "score"}; an image
without one got no box.
--data: a file of COCO instances.
"""

from __future__ import annotations

import math
from collections import Counter

from ans_core.benchmarks.public import files, gcg
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.metrics import coco


def score(inputs: Inputs) -> Scored:
    truth, images = gcg.read_truth(inputs.truth)
    annotations, results = truth.records("annotations"), files.records(inputs.predictions)
    for record in (*annotations, *results):
        _check_box(record)
    for record in results:
        for key in ("category_id", "score"):
            record.number(key)
    predicted = Counter(str(record["image_id"]) for record in results)
    files.refuse_unknown(predicted, images, where=inputs.predictions, what="images")
    true = Counter(str(a["image_id"]) for a in annotations if not a["iscrowd"])
    if not true:
        raise ValueError(f"{inputs.truth}: no true box")
    metrics = coco.figures(truth, gcg.with_image_ids(results, images), kind="bbox")
    return Scored(
        metrics=metrics | {"images": len(images), "true_boxes": true.total(), "boxes": len(results)},
        published={key: percent(metrics[key]) for key in ("AP", "AP50", "AP75")},
        samples=[{"image_id": image, "boxes": predicted[image], "true": true[image]} for image in images],
        notes=[
            "pycocotools' figures: crowd regions are ignored, 100 boxes an image count",
            "no interval: AP is of all images at once",
        ],
    )


def _check_box(record: files.Record) -> None:
    """Raise ValueError for what is no [x, y, width, height] of an image."""
    record.value("image_id")
    box = record.listed("bbox")
    if (
        len(box) != 4
        or not all(type(n) in (int, float) and math.isfinite(n) for n in box)
        or min(box[2:]) < 0
    ):
        raise ValueError(f"{record.where}: bbox {box} is no [x, y, width, height] in pixels")


SCORER = Scorer(score=score, data="a file of COCO instances", sample_id=("image_id",))
