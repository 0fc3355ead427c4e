"""Features of clips and prompted objects in, SAM2's outputs frame by frame out, each from the memory of those
before it.

Gradients reach back through the memory over the whole clip. With `recompute`, a frame keeps nothing but its
inputs and outputs for the backward pass, which computes it again: a tenth of the activation memory and less
(docs/video.md), at 1.13 times the time on a CPU.

What draws random numbers (dropout, corrective clicks) must draw the same ones again. torch keeps the state of
a GPU's generator for GPUs that it sees among `checkpoint`'s arguments: a closure over tensors would lose it
without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ans_core.model.grounding import Bank, FrameFeatures, Grounding
from ans_core.tracking.batch import PromptedObjects, TrackingBatch
from ans_core.tracking.simulator import corrected

Remember = Callable[[dict[str, Any]], dict[str, Any]]
"""SAM2's record of a frame -> what the memory bank keeps of it."""

REMEMBERED = ("maskmem_features", "maskmem_pos_enc", "obj_ptr")


def remembered(out: dict[str, Any]) -> dict[str, Any]:
    """Return what later frames read of a frame, in the graph."""
    return {key: out[key] for key in REMEMBERED}


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What SAM2 says of some objects in one frame."""

    index: int
    """Of the frame."""
    objects: Int[Tensor, " K"]
    """Index into the batch's objects."""
    prompted: PromptedObjects | None
    """The group that is prompted in this frame; None: a frame that is read from memory."""
    out: dict[str, Any]
    """What `Grounding.step` returns."""


def track(
    sam2: Grounding,
    maps: list[Tensor],
    batch: TrackingBatch,
    groups: Sequence[PromptedObjects],
    *,
    recompute: bool,
    remember: Remember = remembered,
) -> Iterator[Tracked]:
    """Yield the prompted frames of the groups of one track, group by group, and then the other frames after
    the first prompt in order of time, of all objects together: how an object was prompted makes no difference
    to what is done there."""
    frames, length = groups[0].frames, batch.rows.shape[1]
    later = [index for index in range(frames[0], length) if index not in frames]
    bank: Bank = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}

    def run(index: int, objects: Tensor, *, keep: bool, **prompt: Any) -> dict[str, Any]:
        # as it is now: a frame may be computed again when there are later ones
        seen = {kind: dict(outs) for kind, outs in bank.items()}
        step: Callable[..., dict[str, Any]] = partial(sam2.step, frames=length, remember=keep, **prompt)
        read = (maps, batch.rows[objects, index], index, seen)
        return checkpoint(step, *read, use_reentrant=False) if recompute else step(*read)

    for index in frames:
        records = []
        for group in groups:
            out = run(index, group.objects, keep=bool(later), **_prompt(batch, group, index))
            if later:
                records.append(remember(out))
            yield Tracked(index=index, objects=group.objects, prompted=group, out=out)
        if later:
            bank["cond_frame_outputs"][index] = _together(records)
    every = torch.cat([group.objects for group in groups])
    for index in later:
        keep = index != later[-1]
        out = run(index, every, keep=keep)
        if keep:
            bank["non_cond_frame_outputs"][index] = remember(out)
        yield Tracked(index=index, objects=every, prompted=None, out=out)


def _together(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of the objects of all groups, of what the memory bank keeps of each."""

    def joined(values: Sequence[Any]) -> Any:
        return (
            [joined(levels) for levels in zip(*values, strict=True)]
            if isinstance(values[0], list)
            else torch.cat(list(values))
        )

    return {key: joined([one[key] for one in records]) for key in REMEMBERED}


def _prompt(batch: TrackingBatch, group: PromptedObjects, index: int) -> dict[str, Any]:
    """Return the arguments of `Grounding.step` that prompt this frame."""
    target = batch.targets[group.objects, index]
    if group.kind == "mask":
        return {"masks": target[:, None].float()}
    place = group.frames.index(index)
    prompt = {"point_coords": group.coordinates[:, place], "point_labels": group.labels[:, place]}
    return {"prompt": prompt, "correct": partial(corrected, target=target), "corrections": group.clicks}


def encode(sam2: Grounding, frames: Tensor, *, at_once: int, recompute: bool) -> FrameFeatures:
    """Run the image encoder on so many frames at a time. If it is trained, `recompute` computes each frame
    again by itself in the backward pass."""
    trained = any(p.requires_grad for p in sam2.image_encoder.parameters())
    if trained and recompute:
        # What is computed again is held at once, 5.8 GB a frame of 1024 pixels in SAM2's large size: see
        # docs/video.md.
        at_once = 1
    chunks = []
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
        for chosen in frames.split(at_once):
            chunks.append(
                checkpoint(sam2.encode, chosen, use_reentrant=False)
                if trained and recompute
                else sam2.encode(chosen)
            )
    fine, middle, coarse = (
        torch.cat([getattr(chunk, name) for chunk in chunks]) for name in ("fine", "middle", "coarse")
    )
    return FrameFeatures(fine=fine, middle=middle, coarse=coarse)
