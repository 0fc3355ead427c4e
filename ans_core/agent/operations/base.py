"""What an operation is: a name, a sentence, typed arguments, and a function from a workspace to new handles
and a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import THOUSAND, Box, Handle, ImageHandle, Workspace, box_of

if TYPE_CHECKING:
    from ans_core.model.network import Network

SMALLEST = 8
"""Native pixels that a box must have on each side: a tiny model's tile of 96 shows them 12 times as large."""
SMALLEST_FULL = 28
"""The same for models whose tile has FULL_TILE pixels or more (Qwen2.5-VL's limit, 28; DeepEyes refuses below
30)."""
FULL_TILE = 224
LONGEST_ASPECT = 100
"""Longer side over shorter side of a box (DeepEyes)."""

Box2D = Annotated[
    list[int], Field(min_length=4, max_length=4, description="x1, y1, x2, y2 in thousandths of the image")
]
Point2D = Annotated[
    list[int], Field(min_length=2, max_length=2, description="x, y in thousandths of the image")
]
ImageName = Annotated[str, Field(description="an image, as image_1")]
MaskName = Annotated[str, Field(description="a mask, as mask_1")]


class Arguments(BaseModel):
    """Strict: 250 is no text, "250" no number, true neither; an argument that is not listed is refused. What
    goes together is checked by a validator, which raises Refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What operations work with, beside the workspace."""

    tile: int
    """Pixels on a side of what the language model sees: crops are enlarged to it at least."""
    ocr: str = "rapidocr"
    """Reader of READ_TEXT (`ans_core.agent.ocr.Reader`)."""
    model: Network | None = None
    """Frozen, adapters off; or another model that segments for the agent. None in the worker process."""

    @property
    def smallest(self) -> int:
        return SMALLEST if self.tile < FULL_TILE else SMALLEST_FULL


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an operation gives back."""

    text: str
    """For the model to read."""
    values: dict[str, Any]
    """The same for programs: what JSON can hold."""
    handles: tuple[Handle, ...] = ()
    """New ones; their names are `workspace.next_names(handles)`."""
    pictures: tuple[str, ...] = ()
    """Names of images that the model is shown."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One visual operation. `run` raises Refused for what a call can get wrong."""

    name: str
    sentence: str
    """What it does, for the prompt."""
    arguments: type[Arguments]
    run: Callable[[Workspace, Any, Tools], Result]
    needs_model: bool = False
    """Without a model it runs in a process of its own, which is killed at the time limit; it must then be a
    module's function."""
    load: Callable[[Tools], object] | None = None
    """What its first run in a process would load; called before that run, outside of the time limit. A
    module's function."""
    for_clips: bool = False
    """It refuses a single picture, so traces of one that call it are refused as they are read."""
    call_pieces: tuple[str, ...] = ()
    """What stands between a call's values, as `protocol.call_text` writes it, for tokenizers that never saw
    calls."""


def pixel_box(workspace: Workspace, image: str, bbox_2d: Sequence[int], *, smallest: int) -> ImageHandle:
    """A box in thousandths of an image -> the same part of its frame, in native pixels. Raises Refused."""
    return part_of(workspace.image(image), image, bbox_2d, smallest=smallest)


def part_of(handle: ImageHandle, image: str, bbox_2d: Sequence[int], *, smallest: int) -> ImageHandle:
    """The same of an image, whose name is told where the box is refused."""
    x1, y1, x2, y2 = bbox_2d
    if min(bbox_2d) < 0 or max(bbox_2d) > THOUSAND:
        raise Refused(
            "bad_box",
            f"bbox_2d {list(bbox_2d)} reaches outside of {image}; its corners go from 0 to {THOUSAND}",
        )
    if x2 <= x1 or y2 <= y1:
        raise Refused(
            "bad_box", f"bbox_2d {list(bbox_2d)} is empty; it is [x1, y1, x2, y2] with x1 < x2 and y1 < y2"
        )
    left, top, right, bottom = handle.box
    wide, high = right - left, bottom - top
    box: Box = (
        left + x1 * wide // THOUSAND,
        top + y1 * high // THOUSAND,
        left + -(-x2 * wide // THOUSAND),
        top + -(-y2 * high // THOUSAND),
    )
    check_size(box, smallest=smallest)
    return ImageHandle(frame=handle.frame, box=box)


def check_size(box: Box, *, smallest: int) -> None:
    width, height = box[2] - box[0], box[3] - box[1]
    if min(width, height) < smallest:
        raise Refused(
            "bad_box",
            f"the box is {width} x {height} pixels; it needs {smallest} on each side, take a larger one",
        )
    if max(width, height) > LONGEST_ASPECT * min(width, height):
        raise Refused(
            "bad_box",
            f"the box is {width} x {height} pixels; its sides may differ {LONGEST_ASPECT} times at most",
        )


def check_point(point_2d: Sequence[int], image: str) -> None:
    if not all(0 <= value <= THOUSAND for value in point_2d):
        raise Refused(
            "bad_box",
            f"point_2d {list(point_2d)} is outside of {image}; x and y go from 0 to {THOUSAND}",
        )


def check_frames(numbers: Sequence[int], count: int) -> None:
    if not all(0 <= frame < count for frame in numbers):
        raise Refused("bad_box", f"frames {list(numbers)}: the clip has frames 0 to {count - 1}")


def around(workspace: Workspace, mask: str, *, smallest: int, margin: float) -> ImageHandle:
    """The box around a mask, larger by `margin` of its longer side on every side, and by what is missing to
    `smallest`."""
    x1, y1, x2, y2 = box_of(workspace.pixels(mask))
    more = round(margin * max(x2 - x1, y2 - y1))
    across, down = max(more, -(-(smallest - x2 + x1) // 2)), max(more, -(-(smallest - y2 + y1) // 2))
    frame = workspace.mask(mask).frame
    width, height = workspace.size(frame)
    left, right = _inside(x1 - across, x2 + across, smallest=smallest, side=width)
    top, bottom = _inside(y1 - down, y2 + down, smallest=smallest, side=height)
    check_size((left, top, right, bottom), smallest=smallest)
    return ImageHandle(frame=frame, box=(left, top, right, bottom))


def _inside(low: int, high: int, *, smallest: int, side: int) -> tuple[int, int]:
    """Return what of an interval lies in the picture, with `smallest` pixels where the picture has them."""
    low = max(0, min(low, side - smallest))
    return low, min(side, max(high, low + smallest))
