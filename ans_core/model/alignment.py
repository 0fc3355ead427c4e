"""Pre-training of word embeddings and projector: described things and pictures in, the loss of finding a thing by the sum of its words out.

Stands in for what a published InternVL learns before its language model is trained: image tokens that lie near the words for what they
show (a contrast as CLIP's, but between the cells of one picture). Half a minute of it saves a tiny language model from finding this
space by itself (LOG).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ans_core import rle, transforms
from ans_core.data.collate import cell_shares
from ans_core.model.sa2va import Sa2VA
from ans_core.types import ImageRef, Sample

FIRST_SCALE = 5.0
"""Of the cosines, before it is learned."""


@dataclass(frozen=True, kw_only=True)
class AlignmentBatch:
    """N described things of B pictures."""

    pixels: Float[Tensor, "B 3 S S"]
    image: Int[Tensor, " N"]
    """Which picture a thing is in."""
    words: Int[Tensor, "N W"]
    """Tokens of its description; -1 = padding."""
    shares: Float[Tensor, "N cells"]
    """How it spreads over the cells of its picture; adds up to 1."""

    def to(self, device: torch.device | str) -> AlignmentBatch:
        return AlignmentBatch(**{k: getattr(self, k).to(device) for k in self.__dataclass_fields__})


def alignment_batch(
    pictures: Sequence[tuple[ImageRef, Sequence[Sample]]], tokenizer: PreTrainedTokenizerBase, *, size: int, grid: int
) -> AlignmentBatch:
    """pictures: (image, samples of it that name something in it)."""
    image, words, shares = [], [], []
    for place, (_, samples) in enumerate(pictures):
        for sample in samples:
            image.append(place)
            words.append(torch.tensor(tokenizer.encode(" " + sample.text, add_special_tokens=False)))
            shares.append(cell_shares(rle.union([mask for mask, *_ in sample.masks if mask is not None]), grid))
    return AlignmentBatch(
        pixels=transforms.normalise([transforms.open_image(ref) for ref, _ in pictures], size=size),
        image=torch.tensor(image),
        words=nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=-1),
        shares=torch.stack(shares),
    )


class Alignment(nn.Module):
    """Cross-entropy of the cells that a thing covers, from the cosines of its words with each cell, added up over the words."""

    def __init__(self, model: Sa2VA) -> None:
        super().__init__()
        self.model = model
        self.log_scale = nn.Parameter(torch.tensor(math.log(FIRST_SCALE)))

    def forward(self, batch: AlignmentBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        with torch.no_grad():
            features = self.model.vision_features(batch.pixels)
        cells = F.normalize(self.model.project(features).float(), dim=-1)
        table = F.normalize(self.model.internvl.get_input_embeddings().weight, dim=-1)
        meaning = (table[batch.words.clamp(min=0)] * (batch.words >= 0)[:, :, None]).sum(1)  # (N, D)
        scores = self.log_scale.exp() * torch.einsum("nd,ncd->nc", meaning, cells[batch.image])
        loss = -(batch.shares * scores.log_softmax(1)).sum(1).mean()
        hit = (batch.shares.gather(1, scores.argmax(1, keepdim=True)) > 0).float().mean()
        return loss, {"hit": float(hit)}
