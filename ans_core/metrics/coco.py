"""Truth and results in COCO's layout -> pycocotools' own figures, without what it prints."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

PRECISIONS = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
RECALLS = ("AR_max1", "AR_max10", "AR_max100", "AR_small", "AR_medium", "AR_large")


def figures(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    *,
    kind: Literal["segm", "bbox"],
    evaluator: type[COCOeval] = COCOeval,
) -> dict[str, float]:
    """Return the twelve, of masks or of boxes; all 0 without results. The truth needs its categories."""
    names = (*PRECISIONS, *RECALLS)
    if not results:
        return dict.fromkeys(names, 0.0)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {"info": {}, **truth}
        coco.createIndex()
        evaluation = evaluator(coco, coco.loadRes([dict(result) for result in results]), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(names, map(float, evaluation.stats), strict=True))
