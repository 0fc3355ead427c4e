"""LOCATE: words -> the mask that the referring model draws for them, and the crop around it: say what, see
where.

One call in place of `segment_object_at` by words and `zoom_in` on its mask."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ans_core.agent.operations import segment_object_at
from ans_core.agent.operations.base import Arguments, ImageName, Operation, Result, Tools, around
from ans_core.agent.operations.segment_object_at import LONGEST_TEXT, SegmentObjectAt
from ans_core.agent.operations.zoom_in import MARGIN
from ans_core.agent.workspace import Workspace


class Locate(Arguments):
    text: Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT, description="what to look for")]
    image: ImageName | None = None


def run(workspace: Workspace, arguments: Locate, tools: Tools) -> Result:
    """Of several objects that the words mean, the first is taken. A thing too small for a crop is refused,
    with its mask lost."""
    segmented = segment_object_at.run(
        workspace, SegmentObjectAt(text=arguments.text, image=arguments.image), tools
    )
    (mask,) = segmented.handles
    crop = around(workspace.add([mask]), segmented.values["mask"], smallest=tools.smallest, margin=MARGIN)
    (name,) = workspace.next_names([crop])
    box = workspace.thousandths(crop.box, frame=crop.frame)
    return Result(
        text=f"{segmented.text}; {name}: {box}",
        values=segmented.values | {"image": name},
        handles=(mask, crop),
        pictures=(name,),
    )


LOCATE = Operation(
    name="locate",
    sentence="Draws the mask of what a text means and shows its surroundings, enlarged.",
    arguments=Locate,
    run=run,
    needs_model=True,
)
"""No call_pieces: agents that were trained before keep their tokens, and small ones, which know no other
words of calls, don't say it."""
