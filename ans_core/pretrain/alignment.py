"""Pre-training of word embeddings and projector: described things and pictures in; out, the loss of finding a
thing by the sum of its words, and of telling a region's words from its cells.

It replaces what a published InternVL learns before its language model is trained: image tokens that lie near
the words for what they show (a contrast in both directions as CLIP's, but between the cells of one picture,
and between the words of the vocabulary). Half a minute of it saves a tiny language model from finding this
space by itself (LOG).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ans_core.data.collate import cell_shares
from ans_core.data.tensor_batch import TensorBatch
from ans_core.data.views import Cutter, Views
from ans_core.model.network import Network
from ans_core.model.supervised import image_tokens
from ans_core.pictures import rle, transforms
from ans_core.pretrain.region_words import NOT_SAID
from ans_core.types import ImageRef, Sample

FIRST_SCALE = 5.0
"""Initial scale of a thing's cosines with cells; it is learned."""
FIRST_WORD_SCALE = 10.0
"""Initial scale of a region's cosines with words."""


@dataclass(frozen=True, kw_only=True)
class AlignmentBatch(TensorBatch):
    """N described things of B pictures."""

    views: list[Views]
    """B pictures of one size."""
    image: Int[Tensor, " N"]
    """Index of the picture that a thing is in."""
    words: Int[Tensor, "N W"]
    """Tokens of its description; -1 = padding."""
    shares: Float[Tensor, "N cells"]
    """How it spreads over the cells of its picture; adds up to 1."""
    captions: Bool[Tensor, " N"]
    """The words are a region's complete caption, so all other words are wrong for it."""


def alignment_batch(
    pictures: Sequence[tuple[ImageRef, Sequence[Sample]]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    cutter: Cutter,
) -> AlignmentBatch:
    """Make a batch from pictures: (image, samples of it that name something in it)."""
    views = [cutter.views([transforms.open_image(ref)], clip=False) for ref, _ in pictures]
    image, words, shares, captions = [], [], [], []
    for place, (_, samples) in enumerate(pictures):
        for sample in samples:
            image.append(place)
            words.append(torch.tensor(tokenizer.encode(" " + sample.text, add_special_tokens=False)))
            shares.append(
                cell_shares(
                    rle.union([mask for mask, *_ in sample.masks if mask is not None]), views[place].shown
                )
            )
            captions.append(sample.task == "region_caption")
    return AlignmentBatch(
        views=views,
        image=torch.tensor(image),
        words=nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=-1),
        shares=torch.stack(shares),
        captions=torch.tensor(captions),
    )


class Alignment(nn.Module):
    """Cross-entropy of the cells that a thing covers, from the cosines of its words with each cell, summed
    over the words; plus binary cross-entropy of a region's words, summed over the vocabulary, from the
    cosines of its mean cell with each word."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.model = model
        self.log_scale = nn.Parameter(torch.tensor(math.log(FIRST_SCALE)))
        self.log_word_scale = nn.Parameter(torch.tensor(math.log(FIRST_WORD_SCALE)))
        self.word_bias = nn.Parameter(
            torch.full((model.vlm.get_input_embeddings().num_embeddings,), NOT_SAID)
        )

    def forward(self, batch: AlignmentBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        weight = self.model.vlm.get_input_embeddings().weight
        tokens = image_tokens(self.model, batch.views).values[:, : weight.shape[1]]
        # (N, cells, D), of unit length
        cells = F.normalize(tokens.float(), dim=-1).unflatten(0, (len(batch.views), -1))[batch.image]
        table = F.normalize(weight, dim=-1)
        meaning = (table[batch.words.clamp(min=0)] * (batch.words >= 0)[:, :, None]).sum(1)  # (N, D)
        scores = self.log_scale.exp() * torch.einsum("nd,ncd->nc", meaning, cells)
        place_loss = -(batch.shares * scores.log_softmax(1)).sum(1).mean()
        hit = (batch.shares.gather(1, scores.argmax(1, keepdim=True)) > 0).float().mean()
        word_loss = self._word_loss(
            torch.einsum("nc,ncd->nd", batch.shares, cells)[batch.captions],
            table,
            batch.words[batch.captions],
        )
        return place_loss + word_loss, {
            "hit": float(hit),
            "found": float(place_loss.detach()),
            "told": float(word_loss.detach()),
        }

    def _word_loss(
        self, region: Float[Tensor, "R D"], table: Float[Tensor, "V D"], words: Int[Tensor, "R W"]
    ) -> Float[Tensor, ""]:
        logits = self.log_word_scale.exp() * region @ table.T + self.word_bias
        counted = torch.ones_like(self.word_bias)
        # padding is no word; it starts as zero, where normalising has a gradient of 1e12
        counted[self.model.tokenizer.pad_token_id] = 0
        present = torch.zeros_like(logits)
        rows, places = (words >= 0).nonzero(as_tuple=True)
        present[rows, words[rows, places]] = 1
        return F.binary_cross_entropy_with_logits(logits, present, weight=counted, reduction="sum") / max(
            1, len(present)
        )
