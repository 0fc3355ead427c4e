"""What a user gives (a text with a picture or a video, earlier turns, mask prompts) -> a Request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from ans_core.pictures import media, rle
from ans_core.types import RLE, Request

Region = np.ndarray | Tensor | Image.Image | RLE
"""A mask prompt: every value but 0 is inside."""


def request_of(
    *,
    text: str,
    image: media.Picture | None = None,
    video: media.Video | None = None,
    past: Sequence[tuple[str, str]] | None = None,
    mask_prompts: Sequence[Region] | np.ndarray | None = None,
) -> Request:
    """Build a request. None stands for nothing, as in upstream.

    mask_prompts: each of shape (H, W), or (N, H, W) as in upstream, of anything that numpy reads, or RLE.
    Raises ValueError for a picture and a video together, and for input of a wrong type or shape.
    """
    if image is not None and video is not None:
        raise ValueError("an image and a video at once; ask about one of them")
    frames = () if video is None else tuple(media.clip(video))
    return Request(
        frames=frames if image is None else (media.reference(image),),
        text=text,
        mask_prompts=()
        if mask_prompts is None
        else tuple(region for prompt in mask_prompts for region in _regions(prompt)),
        past=_turns(past or ()),
        clip=bool(frames),
    )


def _turns(past: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    advice = "give the turns before as (question, answer) pairs, without the template's tokens"
    if isinstance(past, str):
        raise ValueError(f"past is a text; {advice}")
    for turn in past:
        if isinstance(turn, dict):
            raise ValueError(
                f"past holds a dict with {', '.join(map(repr, turn))}, as chat messages are; {advice}"
            )
        if isinstance(turn, str) or len(turn) != 2 or not all(isinstance(words, str) for words in turn):
            raise ValueError(f"past holds {turn!r}; {advice}")
    return tuple((question, answer) for question, answer in past)


def _regions(prompt: Region) -> list[RLE]:
    if isinstance(prompt, dict):
        height, width = prompt["size"]
        return [rle.from_annotation(prompt, height=height, width=width, where="mask_prompts")]
    masks = np.asarray(prompt)
    if masks.ndim not in (2, 3):
        raise ValueError(
            f"a mask prompt of shape {masks.shape}; give a list of (height, width) or (N, height, width), "
            "or of RLE"
        )
    return [rle.encode(mask != 0) for mask in masks.reshape(-1, *masks.shape[-2:])]
