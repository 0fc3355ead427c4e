"""SELECT_FRAMES: some frames of a clip, each as an image."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ans_core.agent.operations.base import Arguments, Operation, Result, Tools, check_frames
from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import ImageHandle, Workspace

MOST = 8
"""Frames of one call (Pixel-Reasoner)."""


class SelectFrames(Arguments):
    frames: Annotated[list[int], Field(min_length=1, max_length=MOST, description="frame numbers from 0")]


def run(workspace: Workspace, arguments: SelectFrames, tools: Tools) -> Result:
    if not workspace.clip:
        raise Refused("not_a_clip", "select_frames needs a clip, and there is none here")
    check_frames(arguments.frames, len(workspace.frames))
    made = tuple(ImageHandle(frame=frame, box=(0, 0, *workspace.size(frame))) for frame in arguments.frames)
    names = workspace.next_names(made)
    shown = dict(zip(names, arguments.frames, strict=True))
    text = ", ".join(f"{name}: frame {frame}" for name, frame in shown.items())
    return Result(text=text, values={"frames": shown}, handles=made, pictures=tuple(names))


SELECT_FRAMES = Operation(
    name="select_frames",
    sentence=f"Shows frames of a clip, at most {MOST}.",
    arguments=SelectFrames,
    run=run,
    for_clips=True,
    call_pieces=('{"frames": [', "]}"),
)
