"""Video mode `keyframe`: every object is followed from the one seen frame whose track the others bear out.

One `[SEG]` stands for an object in all frames of a clip, and points better in some than in others. In mode
`sa2va` the memory holds what it draws in every seen frame, right or wrong; here it holds one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from ans_core.inference.options import PredictOptions
from ans_core.model.grounding import FrameFeatures
from ans_core.model.network import Network


@torch.no_grad()
def track_from_key_frame(
    model: Network,
    pictures: Sequence[Image.Image],
    seg_embeddings: Float[Tensor, "N C"],
    options: PredictOptions,
    *,
    ahead: int,
) -> Float[Tensor, "N F h4 w4"]:
    """Return low-resolution mask logits of N objects in every frame of a clip.

    The seg embedding draws a mask in each of the K seen frames, and the memory carries each of them to both
    ends of the clip: K tracks. An object keeps the one that has the highest mean IoU with all of them
    (`track_iou`), of equals the first: of two tracks that is always so.

    `ahead` frames are encoded together. Every frame is encoded twice and read by the memory K times, and all
    tracks are held to the end.
    """
    seen, frames, side = options.seen_frames(model, len(pictures)), len(pictures), model.sam2.image_size // 4
    tracks = torch.zeros(len(seg_embeddings), len(seen), frames, side, side, device=model.device)
    with model.inference_autocast():
        for order in (range(frames - 1, -1, -1), range(frames)):
            for index, masks in _sweep(
                model, pictures, list(order), seen, seg_embeddings, options, ahead=ahead
            ):
                for number, logits in masks.items():
                    tracks[:, number, index] = logits
    return tracks[
        torch.arange(len(tracks), device=model.device), track_iou(tracks > 0).sum(dim=-1).argmax(dim=1)
    ]


def track_iou(tracks: Bool[Tensor, "N K F h w"]) -> Float[Tensor, "N K K"]:
    """Return the IoU of every two tracks of an object: all frames' common pixels by all that either has, as
    YouTube-VIS counts it. A track without any pixel has 0 with all, itself included: it must not win because
    others lost the object, too."""
    both = sum((frame[:, :, None] & frame[:, None]).sum(dim=(-2, -1)) for frame in tracks.unbind(dim=2))
    area = tracks.sum(dim=(2, 3, 4))
    return both / (area[:, :, None] + area[:, None] - both).clamp(min=1)


def _sweep(
    model: Network,
    pictures: Sequence[Image.Image],
    order: list[int],
    seen: Sequence[int],
    seg_embeddings: Float[Tensor, "N C"],
    options: PredictOptions,
    *,
    ahead: int,
) -> Iterator[tuple[int, dict[int, Float[Tensor, "N h4 w4"]]]]:
    """Yield a frame's index and its masks in the order given: of every track that has begun, by its number
    (that of its seen frame)."""
    sam2, starts = model.sam2, [order.index(index) for index in seen]
    encoded: dict[int, FrameFeatures] = {}

    def shown(start: int) -> Iterator[tuple[int, FrameFeatures]]:
        yield from ((place, encoded[index]) for place, index in enumerate(order[start:]))

    prompt = sam2.seg_prompts(seg_embeddings, [0])
    tracks = [
        sam2.propagate(shown(start), prompt, objects=len(seg_embeddings), frames=len(order) - start)
        for start in starts
    ]
    for first in range(0, len(order), ahead):
        chosen = order[first : first + ahead]
        features = sam2.encode(options.pixels(model, [pictures[index] for index in chosen]))
        encoded |= {index: features[[place]] for place, index in enumerate(chosen)}
        for place, index in enumerate(chosen, start=first):
            yield (
                index,
                {number: next(tracks[number])[1] for number, start in enumerate(starts) if start <= place},
            )
            del encoded[index]
