"""SEGMENT_OBJECT_AT: a point, a box or words -> the mask of the object, by the frozen model's SAM2 (for
words, by its own `[SEG]`)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from ans_core.agent.operations.base import (
    Arguments,
    Box2D,
    ImageName,
    Operation,
    Point2D,
    Result,
    Tools,
    check_point,
    pixel_box,
)
from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import FIRST, THOUSAND, Workspace, box_of, mask_handle

LONGEST_TEXT = 200


class SegmentObjectAt(Arguments):
    point_2d: Point2D | None = None
    bbox_2d: Box2D | None = None
    text: (
        Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT, description="what to look for")] | None
    ) = None
    image: ImageName | None = None

    @model_validator(mode="after")
    def check_alternatives(self) -> SegmentObjectAt:
        if sum(value is not None for value in (self.point_2d, self.bbox_2d, self.text)) != 1:
            raise Refused("wrong_type", "segment_object_at takes point_2d, bbox_2d or text; give one of them")
        return self


def run(workspace: Workspace, arguments: SegmentObjectAt, tools: Tools) -> Result:
    """Points and boxes count from the image they name; the mask lies on that image's whole frame. Of several
    objects that words mean, the first is taken."""
    # imports networks, which the process of operations without a model does not need
    from ans_core.agent import frozen
    from ans_core.inference import clicks

    assert tools.model is not None
    name = arguments.image or FIRST
    shown, picture = workspace.image(name), workspace.picture(name)
    if arguments.text is not None:
        crop_mask, iou = frozen.mask_by_words(tools.model, picture, arguments.text)
    else:
        crop_mask, iou = clicks.mask_by_points(
            tools.model, picture, _points(workspace, name, arguments, tools)
        )
    if not crop_mask.any():
        raise Refused("nothing_found", "no object was found there; try another point, box or text")
    mask = np.zeros(workspace.size(shown.frame)[::-1], bool)
    x1, y1, x2, y2 = shown.box
    mask[y1:y2, x1:x2] = crop_mask
    made = mask_handle(mask, frame=shown.frame, predicted_iou=round(iou, 3))
    (called,) = workspace.next_names([made])
    box = workspace.thousandths(box_of(mask), frame=shown.frame)
    area, iou = round(100 * float(mask.mean()), 2), round(iou, 2)
    text = f"{called}: {box}, area {area} %, predicted IoU {iou}"
    return Result(
        text=text, values={"mask": called, "bbox_2d": box, "area": area, "iou": iou}, handles=(made,)
    )


def _points(
    workspace: Workspace, image: str, arguments: SegmentObjectAt, tools: Tools
) -> list[tuple[float, float, int]]:
    """(x, y, label), x and y as shares of the image."""
    from ans_core.inference.clicks import BOTTOM_RIGHT, INSIDE, TOP_LEFT

    if arguments.point_2d is not None:
        x, y = arguments.point_2d
        check_point(arguments.point_2d, image)
        return [(x / THOUSAND, y / THOUSAND, INSIDE)]
    assert arguments.bbox_2d is not None
    pixel_box(workspace, image, arguments.bbox_2d, smallest=tools.smallest)
    x1, y1, x2, y2 = (v / THOUSAND for v in arguments.bbox_2d)
    return [(x1, y1, TOP_LEFT), (x2, y2, BOTTOM_RIGHT)]


SEGMENT_OBJECT_AT = Operation(
    name="segment_object_at",
    sentence="Draws the mask of the object at a point, in a box, or that a text means.",
    arguments=SegmentObjectAt,
    run=run,
    needs_model=True,
    call_pieces=('{"point_2d": [', '{"bbox_2d": [', '{"text": "', "]}", '], "image": "image_', '"}'),
)
