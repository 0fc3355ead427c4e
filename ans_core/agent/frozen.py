"""The frozen model's SAM2 as operations use it: words -> a mask, and a mask followed through a clip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool
from PIL import Image
from torch import Tensor

from ans_core import prompts
from ans_core.agent.protocol import without_tokens
from ans_core.model import Sa2VA
from ans_core.model.grounding import FrameFeatures
from ans_core.model.masks import upsample
from ans_core.model.options import PredictOptions
from ans_core.model.video import AHEAD

MOST_TOKENS = 32
"""Of the answer that holds `[SEG]`."""


@torch.no_grad()
def mask_by_words(model: Sa2VA, picture: Image.Image, words: str) -> tuple[Bool[np.ndarray, "H W"], float]:
    """Mask and predicted IoU of the first `[SEG]` that the model says; an empty mask where it says none."""
    asked = prompts.REFERRING_EVAL.format(text=without_tokens(words))
    answer = model.predict(text=asked, image=picture, max_tokens=MOST_TOKENS)
    if not len(answer.seg_embeddings):
        return np.zeros((picture.height, picture.width), bool), 0.0
    with model.own_precision():
        features = model.sam2.encode(PredictOptions().pixels(model, [picture]))
        first = torch.zeros(1, dtype=torch.long, device=model.device)
        out = model.sam2.decode(features, first, answer.seg_embeddings[:1])
    return _mask(model, model.sam2.shown(out)[0], picture), float(out.ious[0].max())


def _mask(model: Sa2VA, logits: Tensor, picture: Image.Image) -> Bool[np.ndarray, "H W"]:
    return upsample(logits, size=model.sam2.image_size, height=picture.height, width=picture.width)


@torch.no_grad()
def follow(model: Sa2VA, pictures: Sequence[Image.Image], mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "F H W"]:
    """An object's masks in the frames of a clip, the first of which is given. By SAM2 as it was before Sa2VA's training where the model
    keeps it: that one was trained to go on from masks."""
    masks = [mask]
    original = model.sam2.config.original_decoder
    with model.own_precision():
        prompts = model.sam2.mask_prompts(torch.from_numpy(mask)[None, None].to(model.device), [0])
        found = model.sam2.propagate(_shown(model, pictures), prompts, objects=1, frames=len(pictures), original=original)
        for index, logits in found:
            if index:
                masks.append(upsample(logits[0], size=model.sam2.image_size, height=mask.shape[0], width=mask.shape[1]))
    return np.stack(masks)


def _shown(model: Sa2VA, pictures: Sequence[Image.Image]) -> Iterator[tuple[int, FrameFeatures]]:
    for start in range(0, len(pictures), AHEAD):
        chosen = pictures[start : start + AHEAD]
        features = model.sam2.encode(PredictOptions().pixels(model, chosen))
        yield from ((start + place, features[[place]]) for place in range(len(chosen)))
