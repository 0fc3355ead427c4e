"""Features of clips and prompted objects in, SAM2's outputs frame by frame out, each from the memory of those before it.

Gradients reach back through the memory over the whole clip. With `recompute`, a frame keeps nothing but its inputs and outputs for the
backward pass, which computes it again: a tenth of the activation memory and less (docs/video.md), at 1.13 times the time on a CPU.

What draws random numbers (dropout, corrective clicks) must draw the same ones again. torch keeps the state of a GPU's generator for GPUs
that it sees among `checkpoint`'s arguments: a closure over tensors would lose it without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
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


def track(
    sam2: Grounding,
    maps: list[Tensor],
    batch: TrackingBatch,
    group: PromptedObjects,
    *,
    recompute: bool,
    remember: Remember = remembered,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (frame, what `Grounding.step` returns) of a group's objects: the prompted frames first, then the others after the first
    prompt in order of time."""
    rows, length = batch.rows[group.objects], batch.rows.shape[1]
    later = [index for index in range(group.frames[0], length) if index not in group.frames]
    bank: Bank = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}
    for index in (*group.frames, *later):
        seen = {kind: dict(outs) for kind, outs in bank.items()}  # as it is now: a frame may be computed again when there are later ones
        keep = bool(later) and index != later[-1]
        step: Callable[..., dict[str, Any]] = partial(sam2.step, frames=length, remember=keep, **_prompt(batch, group, index))
        read = (maps, rows[:, index], index, seen)
        out = checkpoint(step, *read, use_reentrant=False) if recompute else step(*read)
        if keep:
            kind = "cond_frame_outputs" if index in group.frames else "non_cond_frame_outputs"
            bank[kind][index] = remember(out)
        yield index, out


def _prompt(batch: TrackingBatch, group: PromptedObjects, index: int) -> dict[str, Any]:
    """Return the arguments of `Grounding.step` that prompt this frame."""
    if index not in group.frames:
        return {}
    target = batch.targets[group.objects, index]
    if group.kind == "mask":
        return {"masks": target[:, None].float()}
    place = group.frames.index(index)
    prompt = {"point_coords": group.coordinates[:, place], "point_labels": group.labels[:, place]}
    return {"prompt": prompt, "correct": partial(_correct, target=target), "corrections": group.clicks}


def _correct(prompt: dict[str, Tensor], logits: Tensor, *, target: Tensor) -> dict[str, Tensor]:
    return corrected(prompt, logits, target)


def encode(sam2: Grounding, frames: Tensor, *, at_once: int, recompute: bool) -> FrameFeatures:
    """Run the image encoder on so many frames at a time. If it is trained, `recompute` computes each frame again by itself in the backward
    pass."""
    trained = any(p.requires_grad for p in sam2.image_encoder.parameters())
    if trained and recompute:
        at_once = 1  # what is computed again is held at once: 5.8 GB a frame of 1024 pixels in SAM2's large size (docs/video.md)
    chunks = []
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
        for chosen in frames.split(at_once):
            chunks.append(checkpoint(sam2.encode, chosen, use_reentrant=False) if trained and recompute else sam2.encode(chosen))
    fine, middle, coarse = (torch.cat([getattr(chunk, name) for chunk in chunks]) for name in ("fine", "middle", "coarse"))
    return FrameFeatures(fine=fine, middle=middle, coarse=coarse)
