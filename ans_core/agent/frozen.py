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
from ans_core.inference.options import PredictOptions
from ans_core.inference.predict import answers
from ans_core.inference.requests import request_of
from ans_core.inference.video import AHEAD
from ans_core.model.grounding import FrameFeatures
from ans_core.model.masks import upsample
from ans_core.model.network import Network

MOST_TOKENS = 32
"""Of the answer that holds `[SEG]`."""


@torch.no_grad()
def mask_by_words(model: Network, picture: Image.Image, words: str) -> tuple[Bool[np.ndarray, "H W"], float]:
    """Mask and predicted IoU of the first `[SEG]` that the model says; an empty mask where it says none."""
    question = prompts.REFERRING_EVAL.format(text=without_tokens(words))
    options = PredictOptions(mode=model.video_mode("auto"))
    (answer,) = answers(model, [request_of(text=question, image=picture)], options, max_tokens=MOST_TOKENS)
    if not len(answer.seg_embeddings):
        return np.zeros((picture.height, picture.width), bool), 0.0
    with model.inference_autocast():
        features = model.sam2.encode(PredictOptions().pixels(model, [picture]))
        first = torch.zeros(1, dtype=torch.long, device=model.device)
        out = model.sam2.decode(features, first, answer.seg_embeddings[:1])
    return _mask(model, model.sam2.shown(out)[0], picture), float(out.ious[0].max())


def _mask(model: Network, logits: Tensor, picture: Image.Image) -> Bool[np.ndarray, "H W"]:
    return upsample(logits, size=model.sam2.image_size, height=picture.height, width=picture.width)


class Clip:
    """Pictures of a clip as SAM2 sees them. The AHEAD last ones that were encoded are kept: whoever goes back
    meets them first."""

    def __init__(self, model: Network, pictures: Sequence[Image.Image]) -> None:
        self.model, self.pictures = model, pictures
        self._recent: dict[int, FrameFeatures] = {}

    def along(self, frames: Sequence[int]) -> Iterator[tuple[int, FrameFeatures]]:
        """Yield (place in `frames`, features of that frame), AHEAD frames encoded in one batch."""
        for place, frame in enumerate(frames):
            if frame not in self._recent:
                new = [ahead for ahead in frames[place : place + AHEAD] if ahead not in self._recent]
                features = self.model.sam2.encode(
                    PredictOptions().pixels(self.model, [self.pictures[ahead] for ahead in new])
                )
                self._recent |= {ahead: features[[number]] for number, ahead in enumerate(new)}
                self._recent = dict(list(self._recent.items())[-AHEAD:])
            yield place, self._recent[frame]


@torch.no_grad()
def follow(clip: Clip, frames: Sequence[int], mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "F H W"]:
    """An object's masks in frames of a clip, in their order; that of the first one is given. By SAM2 as it
    was before Sa2VA's training where the model keeps it: that one was trained to go on from masks."""
    masks, sam2 = [mask], clip.model.sam2
    with clip.model.inference_autocast():
        prompts = sam2.mask_prompts(torch.from_numpy(mask)[None, None].to(clip.model.device), [0])
        original = sam2.config.original_decoder
        for place, logits in sam2.propagate(
            clip.along(frames), prompts, objects=1, frames=len(frames), original=original
        ):
            if place:
                masks.append(
                    upsample(logits[0], size=sam2.image_size, height=mask.shape[0], width=mask.shape[1])
                )
    return np.stack(masks)
