"""Pre-training of a vision tower: pictures and described regions in, the loss of telling a region's words
from its features out.

It replaces what a published vision tower has learned from image-text pairs. One linear layer predicts the
words of a region's caption as a bag of words (as CatLIP does for whole images) from the mean feature of the
region's patches, so that the gradient reaches every patch directly. Through the language model alone, colour
and place are learned in minutes, shape is not (LOG).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ans_core.data.tensor_batch import TensorBatch
from ans_core.data.views import Cutter, Views
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.types import ImageRef, Sample

NOT_SAID = -4.0
"""Initial bias of every word, as in SigLIP: most words are not in a caption."""


@dataclass(frozen=True, kw_only=True)
class WordsBatch(TensorBatch):
    """N described regions of B pictures."""

    views: list[Views]
    """B pictures of one size."""
    image: Int[Tensor, " N"]
    """Index of the picture that a region is in."""
    weights: Float[Tensor, "N P"]
    """Equal for all patches that the region touches, 0 elsewhere; they add up to 1."""
    words: Float[Tensor, "N V"]
    """1 for every token of the region's caption."""


def words_batch(
    pictures: Sequence[tuple[ImageRef, Sequence[Sample]]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    cutter: Cutter,
) -> WordsBatch:
    """Make a batch from pictures: (image, its region-caption samples). An image token has 2 x 2 patches."""
    views = [cutter.views([transforms.open_image(ref)], clip=False) for ref, _ in pictures]
    image, weights, words = [], [], []
    for place, (_, samples) in enumerate(pictures):
        for sample in samples:
            mask = sample.masks[0][0]
            assert mask is not None, f"{sample.sample_id}: a region sample has its mask in the first frame"
            image.append(place)
            rows, columns = views[place].shown
            covered = transforms.coverage(rle.decode(mask), grid=(2 * rows, 2 * columns))
            touched = (covered.flatten() > 0).float()  # edges of a region tell its shape
            weights.append(touched / touched.sum())
            bag = torch.zeros(len(tokenizer))
            bag[tokenizer.encode(" " + sample.text, add_special_tokens=False)] = 1
            words.append(bag)
    return WordsBatch(
        views=views, image=torch.tensor(image), weights=torch.stack(weights), words=torch.stack(words)
    )


class RegionWords(nn.Module):
    """Binary cross-entropy of the bag of words, summed over the vocabulary, mean over regions. The head is
    discarded."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.model = model
        width = model.vlm.config.vision_config.hidden_size
        words = nn.Linear(width, len(model.tokenizer))
        nn.init.constant_(words.bias, NOT_SAID)
        self.head = nn.Sequential(nn.LayerNorm(width), words)

    def forward(self, batch: WordsBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        grids = tuple(grid for one in batch.views for grid in one.grids)
        patches = self.model.backbone.patch_features(torch.cat([one.pixels for one in batch.views]), grids)
        hidden = patches.unflatten(0, (len(batch.views), -1))  # (B, P, C)
        pooled = (batch.weights[:, :, None] * hidden[batch.image]).sum(1)
        logits = self.head(pooled).float()
        loss = F.binary_cross_entropy_with_logits(logits, batch.words, reduction="none").sum(1).mean()
        with torch.no_grad():
            best = logits.topk(int(batch.words.sum(1).max()), dim=1).indices
            recall = (batch.words.gather(1, best).sum(1) / batch.words.sum(1)).mean()
        return loss, {"recall": float(recall)}
