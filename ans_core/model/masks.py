"""Seg embeddings -> masks: pictures in one batch, clips frame by frame through SAM2's memory; every picture and frame is encoded once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from ans_core import transforms
from ans_core.model.config import VideoMode
from ans_core.model.grounding import FrameFeatures, in_order
from ans_core.model.sa2va import Sa2VA
from ans_core.types import ImageRef, Request

AHEAD = 8
"""Frames of a clip that are encoded in one batch."""

Constants = Literal["fp32", "bf16"]
"""Mean and standard deviation that SAM2's pictures are normalised with. `bf16`: rounded, as the reference's inference does by accident (up
to 0.008 off), for numbers equal to its own; `fp32` is what SAM2, and the reference in training, uses."""


@dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """How clips are seen and masks drawn."""

    mode: VideoMode = "sa2va"
    constants: Constants = "fp32"

    def __post_init__(self) -> None:
        if self.constants not in get_args(Constants):
            raise ValueError(f"constants {self.constants!r}; there are {', '.join(get_args(Constants))}")

    def pixels(self, model: Sa2VA, pictures: Sequence[Image.Image]) -> Float[Tensor, "B 3 S S"]:
        """What SAM2 sees of pictures."""
        constants = torch.bfloat16 if self.constants == "bf16" else torch.float32
        return transforms.normalise(pictures, size=model.sam2.image_size, constants=constants).to(model.device)


def decode_masks(
    model: Sa2VA,
    requests: Sequence[Request],
    images: list[list[Image.Image]],
    embeddings: list[Float[Tensor, "_ C"]],
    options: VideoOptions,
) -> list[Float[Tensor, "N F h4 w4"]]:
    """Low-resolution mask logits of every row: images in one batch, clips one after the other through the memory, each with the objects of
    all its rows. A picture that several rows ask about is encoded once."""
    side = model.sam2.image_size // 4
    masks = [torch.zeros(0, len(pictures), side, side, device=model.device) for pictures in images]
    frames = [request.frames for request in requests]
    with_segs = [i for i, e in enumerate(embeddings) if len(e) and images[i]]
    stills = [i for i in with_segs if not requests[i].is_clip]
    if stills:
        shown = {frames[i]: images[i][0] for i in stills}
        place = {key: number for number, key in enumerate(shown)}
        features = model.sam2.encode(options.pixels(model, list(shown.values())))
        frame = torch.tensor([place[frames[i]] for i in stills for _ in embeddings[i]], device=model.device)
        logits = model.sam2.decode(features, frame, torch.cat([embeddings[i] for i in stills])).logits
        for i, own in zip(stills, logits.split([len(embeddings[i]) for i in stills]), strict=True):
            masks[i] = own[:, None]
    clips: dict[tuple[ImageRef, ...], list[int]] = defaultdict(list)
    for i in with_segs:
        if requests[i].is_clip:
            clips[frames[i]].append(i)
    for rows in clips.values():
        objects = [embeddings[i] for i in rows]
        logits = track(model, images[rows[0]], torch.cat(objects), options)
        for i, own in zip(rows, logits.split([len(o) for o in objects]), strict=True):
            masks[i] = own
    return masks


def track(
    model: Sa2VA, pictures: list[Image.Image], seg_embeddings: Float[Tensor, "N C"], options: VideoOptions
) -> Float[Tensor, "N F h4 w4"]:
    """Low-resolution mask logits of N objects in every frame of a clip."""
    found = dict(track_frames(model, len(pictures), lambda index: pictures[index], seg_embeddings, options))
    return torch.stack([found[index] for index in range(len(pictures))], dim=1)


@torch.no_grad()
def track_frames(
    model: Sa2VA, frames: int, picture: Callable[[int], Image.Image], seg_embeddings: Float[Tensor, "N C"], options: VideoOptions
) -> Iterator[tuple[int, Float[Tensor, "N h4 w4"]]]:
    """(index, low-resolution mask logits of N objects): the seen frames, then the others in order of time. Every frame is asked for and
    encoded once, AHEAD at a time, and forgotten with the next.

    Mode `sa2va-i`: the seen frames are decoded each alone, as in training, and their masks, at the pictures' size, prompt the original
    SAM2 (kumuji/Sa2VA-i).
    """
    seen = model.seen_frames(frames, options.mode)
    first = [picture(index) for index in seen]
    with model.own_precision():
        known = model.sam2.encode(options.pixels(model, first))
        if options.mode == "sa2va":
            prompts_of = model.sam2.seg_prompts(seg_embeddings, seen)
        else:
            frame = torch.tensor(range(len(seen)), device=model.device).repeat(len(seg_embeddings))
            alone = model.sam2.decode(known, frame, seg_embeddings.repeat_interleave(len(seen), dim=0)).logits
            masks = F.interpolate(alone[None], size=(first[0].height, first[0].width), mode="bilinear")[0] > 0
            prompts_of = model.sam2.mask_prompts(masks.unflatten(0, (-1, len(seen))), seen)

    def shown() -> Iterator[tuple[int, FrameFeatures]]:
        yield from ((index, known[[place]]) for place, index in enumerate(seen))
        rest = in_order(prompts_of, frames)[len(seen) :]
        for start in range(0, len(rest), AHEAD):
            chosen = rest[start : start + AHEAD]
            features = model.sam2.encode(options.pixels(model, [picture(index) for index in chosen]))
            yield from ((index, features[[place]]) for place, index in enumerate(chosen))

    original = options.mode == "sa2va-i"
    found = model.sam2.propagate(shown(), prompts_of, objects=len(seg_embeddings), frames=frames, original=original)
    while True:
        with model.own_precision():  # not around the `yield`: whoever takes a mask computes in a precision of their own
            one = next(found, None)
        if one is None:
            return
        yield one


def upsample(logits: Float[Tensor, "h w"], *, size: int, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """Upstream's two bilinear steps (to the model's square, then to the picture) and its threshold sigmoid > 0.5."""
    square = F.interpolate(logits[None, None].float(), size=(size, size), mode="bilinear", align_corners=False)
    return (F.interpolate(square, size=(height, width), mode="bilinear", align_corners=False)[0, 0] > 0).cpu().numpy()


def stream_masks(
    model: Sa2VA, frames: Sequence[ImageRef], embeddings: Float[Tensor, "N C"], options: VideoOptions
) -> Iterator[tuple[int, Bool[np.ndarray, "N H W"]]]:
    """(index, masks) of a clip in order of time. Frames are opened when they are needed; masks of the seen frames wait for their turn.
    Without `[SEG]` there are no frames. Raises ValueError for a frame of another size than the first."""
    if not len(embeddings):
        return
    width, height = transforms.open_image(frames[0]).size

    def picture(index: int) -> Image.Image:
        opened = transforms.open_image(frames[index])
        if opened.size != (width, height):
            raise ValueError(f"frame {index} is {opened.width} x {opened.height}, the first {width} x {height}; bring them to one size")
        return opened

    waiting: dict[int, np.ndarray] = {}
    due = 0
    for index, logits in track_frames(model, len(frames), picture, embeddings, options):
        waiting[index] = np.stack([upsample(z, size=model.sam2.image_size, height=height, width=width) for z in logits])
        while due in waiting:
            yield due, waiting.pop(due)
            due += 1
