"""Held-out clips in, J&F out: every object is prompted once, in the first frame that shows it, and followed
to the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from ans_core import dist
from ans_core.metrics.video import j_and_f
from ans_core.model.grounding import Grounding
from ans_core.pictures import rle
from ans_core.tracking.clips import Clip
from ans_core.tracking.follow import ObjectPrompt, check_prompts, frame_logits
from ans_core.tracking.simulator import PromptKind, center
from ans_core.types import RLE

DISTANCES = (1, 2, 4, 8, 16, 32, 64)
"""Frames after the prompt at which J is reported by itself."""


def validate(
    sam2: Grounding, clips: Sequence[Clip], *, prompt: PromptKind, memory: bool = True
) -> dict[str, float]:
    """Return J, F and J&F of all objects, divided among the processes, each of which gets the result; and J
    at DISTANCES.

    J and F count frames with ground truth after the prompted one, mean over an object's frames, then over
    objects. (The benchmarks of DAVIS, MOSE and SA-V leave out each clip's last annotated frame, too:
    `ans_core/benchmarks/public/vos.py`.) An object that is seen in no frame before the last is not followed
    and does not count. `memory`: as in `follow`.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number in range(dist.rank(), len(clips), dist.world_size()):
        for scores in clip_scores(sam2, clips[number], prompt=prompt, memory=memory):
            for name, value in _of_object(scores).items():
                sums[name][0] += value
                sums[name][1] += 1
    names = ["J", "F", *(f"J_at_{d}" for d in DISTANCES)]
    table = dist.shared_sum(
        torch.tensor([sums[name] for name in names], dtype=torch.float64), sam2.device
    ).tolist()
    means = {name: total / count for name, (total, count) in zip(names, table, strict=True) if count}
    if "J" not in means:
        raise ValueError(
            f"none of {len(clips)} validation clips shows an object that a later frame has ground truth for"
        )
    return {"J&F": (means["J"] + means["F"]) / 2, **means}


def _of_object(scores: dict[int, tuple[float, float]]) -> dict[str, float]:
    j, f = (float(np.mean([pair[part] for pair in scores.values()])) for part in (0, 1))
    return {"J": j, "F": f} | {f"J_at_{d}": scores[d][0] for d in DISTANCES if d in scores}


def clip_scores(
    sam2: Grounding, clip: Clip, *, prompt: PromptKind, memory: bool = True
) -> list[dict[int, tuple[float, float]]]:
    """Return (J, F) of each followed object by the distance of the frame from its prompt."""
    objects, predicted = follow_clip(sam2, clip, prompt=prompt, memory=memory)
    scores = []
    for n, masklet in zip(objects, predicted, strict=True):
        first = int(clip.visible[n].argmax())
        truth = {
            index: mask for index, mask in enumerate(clip.masklets[n]) if mask is not None and index > first
        }
        if truth:
            scores.append({index - first: j_and_f(masklet[index], mask) for index, mask in truth.items()})
    return scores


def follow_clip(
    sam2: Grounding, clip: Clip, *, prompt: PromptKind, memory: bool = True
) -> tuple[list[int], list[list[RLE]]]:
    """Return which objects of a clip are followed (those that a frame shows and a later one has ground truth
    for), and their predicted masks in every frame."""
    objects = clip.followed(range(len(clip.frames)))
    if not objects:
        return [], []
    prompts = [true_prompt(clip, n, prompt) for n in objects]
    check_prompts(prompts, clip.frames, where=[f"{clip.name}, object {n}" for n in objects])
    masks: list[list[RLE]] = [[] for _ in objects]
    try:
        for logits in frame_logits(sam2, clip.frames, prompts, memory=memory):
            for masklet, z in zip(masks, logits, strict=True):
                masklet.append(rle.encode(z > 0))
    except ValueError as error:
        raise ValueError(f"{clip.name}: {error}") from error
    return objects, masks


def true_prompt(clip: Clip, n: int, kind: PromptKind) -> ObjectPrompt:
    """Return the mask, the exact box or a click in the middle of an object in the first frame that shows
    it."""
    frame = int(clip.visible[n].argmax())
    coded = clip.masklets[n][frame]
    assert coded is not None, "a visible object has a mask"
    mask = rle.decode(coded)
    if kind == "mask":
        return ObjectPrompt(frame=frame, mask=mask)
    if kind == "point":
        x, y = center(mask)
        return ObjectPrompt(frame=frame, points=((x, y),), labels=(1,))
    return ObjectPrompt.around(mask, frame=frame)
