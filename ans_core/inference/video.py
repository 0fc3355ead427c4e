"""Clips: seg embeddings -> masks, frame by frame through SAM2's memory. Each frame is encoded once (in mode
`keyframe` twice)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from ans_core.inference.keyframe import track_from_key_frame
from ans_core.inference.options import PredictOptions
from ans_core.model.grounding import FrameFeatures, in_order
from ans_core.model.masks import upsample
from ans_core.model.network import Network
from ans_core.pictures import transforms
from ans_core.types import ImageRef

AHEAD = 8
"""Frames of a clip that are encoded in one batch."""


def track(
    model: Network, pictures: list[Image.Image], seg_embeddings: Float[Tensor, "N C"], options: PredictOptions
) -> Float[Tensor, "N F h4 w4"]:
    """Return low-resolution mask logits of N objects in every frame of a clip."""
    masks = dict(track_frames(model, len(pictures), lambda index: pictures[index], seg_embeddings, options))
    return torch.stack([masks[index] for index in range(len(pictures))], dim=1)


def track_frames(
    model: Network,
    frames: int,
    picture: Callable[[int], Image.Image],
    seg_embeddings: Float[Tensor, "N C"],
    options: PredictOptions,
) -> Iterator[tuple[int, Float[Tensor, "N h4 w4"]]]:
    """Yield (index, low-resolution mask logits of N objects): the seen frames first, then the others in order
    of time.

    `picture` opens a frame. It is called once for each frame; AHEAD frames are encoded together and dropped
    before the next. In mode `sa2va-i` each seen frame is decoded alone, as in training. Its masks, at the
    pictures' size, then prompt the original SAM2 (kumuji/Sa2VA-i). Mode `keyframe` opens all frames first,
    and yields them in order of time.
    """
    if options.mode == "keyframe":
        yield from enumerate(
            track_from_key_frame(
                model, [*map(picture, range(frames))], seg_embeddings, options, ahead=AHEAD
            ).unbind(1)
        )
        return
    seen = options.seen_frames(model, frames)
    first = [picture(index) for index in seen]
    precision = model.inference_autocast()
    # no decorator: one of a generator fails where Python ends before the generator does
    with torch.no_grad(), precision:
        seen_features = model.sam2.encode(options.pixels(model, first))
        if options.mode == "sa2va":
            prompts_of = model.sam2.seg_prompts(seg_embeddings, seen)
        else:
            frame = torch.tensor(range(len(seen)), device=model.device).repeat(len(seg_embeddings))
            alone = model.sam2.shown(
                model.sam2.decode(seen_features, frame, seg_embeddings.repeat_interleave(len(seen), dim=0))
            )
            masks = F.interpolate(alone[None], size=(first[0].height, first[0].width), mode="bilinear")[0] > 0
            prompts_of = model.sam2.mask_prompts(masks.unflatten(0, (-1, len(seen))), seen)

    def shown() -> Iterator[tuple[int, FrameFeatures]]:
        yield from ((index, seen_features[[place]]) for place, index in enumerate(seen))
        rest = in_order(prompts_of, frames)[len(seen) :]
        for start in range(0, len(rest), AHEAD):
            chosen = rest[start : start + AHEAD]
            features = model.sam2.encode(options.pixels(model, [picture(index) for index in chosen]))
            yield from ((index, features[[place]]) for place, index in enumerate(chosen))

    original = options.mode == "sa2va-i"
    propagated = model.sam2.propagate(
        shown(), prompts_of, objects=len(seg_embeddings), frames=frames, original=original
    )
    while True:
        with torch.no_grad(), precision:  # not around the `yield`: the caller computes in its own precision
            one = next(propagated, None)
        if one is None:
            return
        yield one


def stream_masks(
    model: Network,
    frames: int,
    reference: Callable[[int], ImageRef],
    embeddings: Float[Tensor, "N C"],
    options: PredictOptions,
) -> Iterator[tuple[int, Bool[np.ndarray, "N H W"]]]:
    """Yield (index, masks) of a clip in order of time; nothing without `[SEG]`. `reference` returns a frame
    when it is needed; masks of the seen frames are kept until their turn. Raises ValueError for a frame of
    another size than the first."""
    if not len(embeddings):
        return
    width, height = transforms.open_image(reference(0)).size

    def picture(index: int) -> Image.Image:
        opened = transforms.open_image(reference(index))
        if opened.size != (width, height):
            raise ValueError(
                f"frame {index} is {opened.width} x {opened.height}, the first {width} x {height}; bring "
                "them to one size"
            )
        return opened

    waiting: dict[int, np.ndarray] = {}
    due = 0
    for index, logits in track_frames(model, frames, picture, embeddings, options):
        waiting[index] = np.stack(
            [upsample(z, size=model.sam2.image_size, height=height, width=width) for z in logits]
        )
        while due in waiting:
            yield due, waiting.pop(due)
            due += 1
