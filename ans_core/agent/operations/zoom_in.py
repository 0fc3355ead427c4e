"""ZOOM_IN: a box of an image, or the surroundings of a mask, as an image of its own, enlarged to the model's
tile at least."""

from __future__ import annotations

from pydantic import model_validator

from ans_core.agent.operations.base import (
    Arguments,
    Box2D,
    ImageName,
    MaskName,
    Operation,
    Result,
    Tools,
    around,
    pixel_box,
)
from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import FIRST, Workspace

MARGIN = 0.1
"""Shown around a mask, as a share of its box's longer side."""


class ZoomIn(Arguments):
    bbox_2d: Box2D | None = None
    image: ImageName | None = None
    mask: MaskName | None = None

    @model_validator(mode="after")
    def check_alternatives(self) -> ZoomIn:
        if (self.bbox_2d is None) == (self.mask is None):
            raise Refused("wrong_type", "zoom_in takes bbox_2d (and an image), or a mask; give one of them")
        if self.mask is not None and self.image is not None:
            raise Refused("wrong_type", "zoom_in takes a mask without an image: a mask knows its frame")
        return self


def run(workspace: Workspace, arguments: ZoomIn, tools: Tools) -> Result:
    """Boxes count from the image they name, so crops chain; without a name it is image_1."""
    if arguments.mask is not None:
        made = around(workspace, arguments.mask, smallest=tools.smallest, margin=MARGIN)
    else:
        assert arguments.bbox_2d is not None
        made = pixel_box(workspace, arguments.image or FIRST, arguments.bbox_2d, smallest=tools.smallest)
    (name,) = workspace.next_names([made])
    box = workspace.thousandths(made.box, frame=made.frame)
    return Result(
        text=f"{name}: {box}", values={"image": name, "bbox_2d": box}, handles=(made,), pictures=(name,)
    )


ZOOM_IN = Operation(
    name="zoom_in",
    sentence="Shows a box of an image (bbox_2d), or the surroundings of a mask, enlarged.",
    arguments=ZoomIn,
    run=run,
    call_pieces=('{"bbox_2d": [', "]}", '], "image": "image_', '{"mask": "mask_', '"}'),
)
