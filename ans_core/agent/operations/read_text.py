"""READ_TEXT: the lines of text in an image, or around a mask, with boxes and confidences."""

from __future__ import annotations

from pydantic import model_validator

from ans_core.agent import ocr
from ans_core.agent.operations.base import (
    Arguments,
    ImageName,
    MaskName,
    Operation,
    Result,
    Tools,
    around,
)
from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import FIRST, Workspace, opened

MARGIN = 0.05
"""Read around a mask, as a share of its box's longer side."""
MOST_LINES = 16


class ReadText(Arguments):
    image: ImageName | None = None
    mask: MaskName | None = None

    @model_validator(mode="after")
    def check_alternatives(self) -> ReadText:
        if self.image is not None and self.mask is not None:
            raise Refused("wrong_type", "image and mask are given; give one of them")
        return self


def run(workspace: Workspace, arguments: ReadText, tools: Tools) -> Result:
    if arguments.mask is None:
        part = workspace.image(arguments.image or FIRST)
    else:
        part = around(workspace, arguments.mask, smallest=tools.smallest, margin=MARGIN)
    lines = ocr.read_lines(opened(workspace.frames[part.frame]).crop(part.box), by=tools.ocr)[:MOST_LINES]
    if not lines:
        raise Refused("nothing_found", "no text was found there; zoom in on it first, or try another place")
    left, top = part.box[:2]
    records = []
    for line in lines:
        x1, y1, x2, y2 = line.box
        box = workspace.thousandths((left + x1, top + y1, left + x2, top + y2), frame=part.frame)
        records.append({"text": line.text, "bbox_2d": box, "confidence": round(line.confidence, 2)})
    text = "; ".join(
        f"{line['bbox_2d']}, confidence {line['confidence']}: {line['text']!r}" for line in records
    )
    return Result(text=text, values={"lines": records})


def load(tools: Tools) -> None:
    ocr.load(tools.ocr)


READ_TEXT = Operation(
    name="read_text",
    sentence="Reads the text in an image or around a mask.",
    arguments=ReadText,
    run=run,
    load=load,
    call_pieces=('{"image": "image_', '{"mask": "mask_', '"}'),
)
