"""TRACK_OBJECT: a mask on one frame -> the object's masks in every frame of the clip, by the memory of the
frozen model's SAM2."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from ans_core.agent.operations.base import Arguments, MaskName, Operation, Result, Tools
from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import TrackHandle, Workspace, box_of, opened
from ans_core.metrics.mask import mask_iou
from ans_core.pictures import rle

MOST_FRAMES = 128
MOST_BOXES = 8
"""Told of a track, evenly spread; the handle holds every frame's mask."""
SEEN = 0.05
"""An object is visible in a frame that shows at least this share of its largest area."""
MOVED = 0.03
"""Of the longer side, between the first and the last visible frame; less is `still`."""


class TrackObject(Arguments):
    mask: MaskName


def run(workspace: Workspace, arguments: TrackObject, tools: Tools) -> Result:
    """Frames after the mask's are followed forwards, those before it backwards. `forward_backward_iou`: the
    mask of the last visible frame, followed back to the first one, against the mask given: low where the
    track went astray."""
    # imports networks, which the process of operations without a model does not need
    from ans_core.agent.frozen import Clip, follow

    assert tools.model is not None
    handle = workspace.mask(arguments.mask)
    if not workspace.clip:
        raise Refused("not_a_clip", "track_object needs a clip, and there is none here")
    if len(workspace.frames) > MOST_FRAMES:
        raise Refused(
            "not_a_clip",
            f"the clip has {len(workspace.frames)} frames; at most {MOST_FRAMES} can be followed",
        )
    start, mask = handle.frame, workspace.pixels(arguments.mask)
    masks = np.zeros((len(workspace.frames), *workspace.size(start)[::-1]), bool)
    clip = Clip(tools.model, [opened(ref) for ref in workspace.frames])
    masks[: start + 1] = follow(clip, range(start, -1, -1), mask)[::-1]
    masks[start:] = follow(clip, range(start, len(masks)), mask)
    end = int(np.flatnonzero(visible(masks))[-1])
    way = range(end, start - 1, -1) if end >= start else range(end, start + 1)
    back = follow(clip, way, masks[end])[-1]
    made = TrackHandle(mask=arguments.mask, counts=tuple(rle.encode(one)["counts"] for one in masks))
    (name,) = workspace.next_names([made])
    values = describe(masks) | {"track": name, "forward_backward_iou": round(float(mask_iou(back, mask)), 2)}
    values["boxes"] = {
        str(f): workspace.thousandths(box_of(masks[f])) for f in _spread(masks) if masks[f].any()
    }
    boxes = ", ".join(f"{frame} {box}" for frame, box in values["boxes"].items())
    text = f"{name}: {values['direction']}, visible in {values['visible']} of {len(masks)} frames"
    text += "".join(f", {word}" for word in ("entered", "left") if values[word])
    text += f", forward-backward IoU {values['forward_backward_iou']}; boxes by frame: {boxes}"
    return Result(text=text, values=values, handles=(made,))


def describe(masks: Bool[np.ndarray, "F H W"]) -> dict[str, Any]:
    """Direction (of the centroid, in the picture), number of frames with the object, whether it entered after
    the first or left before the last. At least one mask has a pixel."""
    seen = visible(masks)
    x, y = way(masks)
    if max(abs(x), abs(y)) < MOVED * max(masks.shape[1:]):
        direction = "still"
    elif abs(x) > abs(y):
        direction = "right" if x > 0 else "left"
    else:
        direction = "down" if y > 0 else "up"
    return {
        "direction": direction,
        "visible": int(seen.sum()),
        "entered": bool(not seen[0]),
        "left": bool(not seen[-1]),
    }


def way(masks: Bool[np.ndarray, "F H W"]) -> tuple[float, float]:
    """Return how far the centroid comes to the right and down, in pixels, between the first and the last
    visible frame."""
    shown = np.flatnonzero(visible(masks))
    first, last = (
        np.array([axis.mean() for axis in np.nonzero(masks[f])[::-1]]) for f in (shown[0], shown[-1])
    )
    x, y = last - first
    return float(x), float(y)


def visible(masks: Bool[np.ndarray, "F H W"]) -> Bool[np.ndarray, " F"]:
    return large_enough(masks.sum((1, 2)))


def large_enough(areas: Int[np.ndarray, " F"]) -> Bool[np.ndarray, " F"]:
    return np.asarray(areas >= max(1.0, SEEN * areas.max()))


def _spread(masks: Bool[np.ndarray, "F H W"]) -> list[int]:
    """At most MOST_BOXES frames, the first and the last among them."""
    return sorted({round(f) for f in np.linspace(0, len(masks) - 1, min(MOST_BOXES, len(masks)))})


TRACK_OBJECT = Operation(
    name="track_object",
    sentence="Follows a mask through the clip: where the object goes, whether it enters or leaves.",
    arguments=TrackObject,
    run=run,
    needs_model=True,
    for_clips=True,
    call_pieces=('{"mask": "mask_', '"}'),
)
