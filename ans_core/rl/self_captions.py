"""Captions for masks that have none, from the model itself: of several samples the one is taken from which the
model draws the mask best, also when words are missing and the picture is turned.

What a caption is worth, nobody has to say: the thing must be found again from it, as in loop 1. From a whole
caption it is found by its place alone, nearly always, so a right colour is worth next to nothing. Random
choices of its words have other words to find it by, and in a turned picture words of place mislead.

The caption that is taken maximizes score + kl x log p(caption): of the samples the likeliest under the policy
that RL with this reward and this weight of the KL divergence ends at, p(caption) exp(score / kl). SFT on such
captions is a step of expectation maximization (ReST-EM, Singh et al. 2023, arXiv:2312.06585; RAFT, Dong et al.
2023, arXiv:2304.06767).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from statistics import fmean, median

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.dist import rng_of, seed_of
from ans_core.inference.generation import spoken_ids, text_of
from ans_core.inference.prefill import prompt, visible
from ans_core.model.network import Network
from ans_core.pictures import transforms
from ans_core.rl.batch import EncodedBatch, EncodedImages, RlBatch, rl_batch
from ans_core.rl.caption_loop import half_of
from ans_core.rl.drawing import drawn
from ans_core.rl.rollout import Reader, sample
from ans_core.types import Sample

MASK_SIDE = 256
"""Masks are compared at this size."""
WORDS = 256
"""Of a longer caption no later word is left out."""


@dataclass(frozen=True, kw_only=True)
class CaptionOptions:
    """How captions are sampled and chosen."""

    samples: int = 16
    """Captions of each mask."""
    kl: float = 0.05
    """Weight of a caption's log-probability (nats, of all its tokens), beside its score."""
    max_tokens: int = 64
    finalists: int = 8
    """The captions, best by the whole, by the first half in the turned picture and by their log-probability,
    that are compared by random choices of their words."""
    choices: int = 4
    """Random choices of words, in the picture as it is and turned; the same places in all captions of a
    mask."""
    kept: float = 0.6
    """Chance of a word to stay."""
    seed: int = 0


@dataclass(kw_only=True)
class SelfCaption:
    """A caption that was sampled, and how well the thing is found again from it."""

    text: str
    logp: float
    """Its log-probability, in nats."""
    ious: list[float] = field(default_factory=list)
    """IoU of the mask with what the model draws from the whole caption; from the first half of its words in
    the turned picture; from random choices of its words in the picture as it is, and turned (means)."""
    gain: float = 0.0
    """What it scores above the mean of the finalists. Where its place alone finds the thing (in the middle of
    the picture, which stays there as it is turned), all score high, and the choice says nothing."""

    @property
    def score(self) -> float:
        return fmean(self.ious)

    def value(self, kl: float) -> float:
        return self.score + kl * self.logp


@dataclass(frozen=True, kw_only=True)
class _Pictures(EncodedBatch):
    network: Network

    @property
    def model(self) -> Network:
        return self.network


@torch.no_grad()
def self_captions(
    model: Network, regions: Sequence[Sample], options: CaptionOptions
) -> list[SelfCaption | None]:
    """Caption the first mask of every region; None where no sample has a word. What is random depends on the
    seed and the region alone."""
    with model.inference_autocast():
        seen = _encoded(model, rl_batch(regions, [""] * len(regions), model, mask_size=MASK_SIDE))
        turned = _encoded(model, _turned(seen.batch, model))
        captions = _sampled(seen, options)
        _compare(seen, captions, lambda region, text: [text])
        _compare(turned, captions, lambda region, text: [half_of(text, "first")])
        finalists = [_best(own, options)[: options.finalists] for own in captions]
        for pictures in (seen, turned):
            _compare(pictures, finalists, lambda region, text: choices_of(text, region, options))
    chosen = [next(iter(_best(own, options)), None) for own in finalists]
    for caption, others in zip(chosen, finalists, strict=True):
        if caption is not None:
            caption.gain = caption.score - fmean(one.score for one in others)
    return chosen


def _best(captions: Sequence[SelfCaption], options: CaptionOptions) -> list[SelfCaption]:
    return sorted(captions, key=lambda caption: -caption.value(options.kl))


def _compare(
    seen: _Pictures,
    captions: Sequence[Sequence[SelfCaption]],
    parts_of: Callable[[Sample, str], list[str]],
) -> None:
    """Add to each caption the mean IoU of what the model draws from parts of it."""
    parts = [
        [parts_of(region, caption.text) for caption in own]
        for region, own in zip(seen.batch.samples, captions, strict=True)
    ]
    compared = drawn_ious(seen, [list(chain.from_iterable(own)) for own in parts])
    for own, texts, ious in zip(captions, parts, compared, strict=True):
        rest = iter(ious)
        for caption, some in zip(own, texts, strict=True):
            caption.ious.append(fmean(islice(rest, len(some))))


def drawn_ious(seen: _Pictures, texts: Sequence[Sequence[str]]) -> list[list[float]]:
    """Return the IoU of each region's mask with what the model draws from each of its texts."""
    if not any(texts):
        return [[] for _ in texts]
    asked, logits = drawn(seen, texts)
    ious = dict(zip(asked, _ious(logits, seen.batch.targets[[i for i, _ in asked]]).tolist(), strict=True))
    return [[ious[i, text] for text in own] for i, own in enumerate(texts)]


def _ious(logits: Float[Tensor, "P h w"], targets: Bool[Tensor, "P M M"]) -> Float[Tensor, " P"]:
    """Return the IoU of masks with targets, at their size."""
    size = targets.shape[-2:]
    masks = F.interpolate(logits[:, None].float(), size=size, mode="bilinear", align_corners=False)[:, 0] > 0
    both, either = (masks & targets).flatten(1).sum(1), (masks | targets).flatten(1).sum(1)
    return both / either.clamp(min=1)


def choices_of(text: str, region: Sample, options: CaptionOptions) -> list[str]:
    """Return random choices of the caption's words, in order; the whole caption where none would stay. The
    places of the words that stay are the same in all captions of a region."""
    rng, words = rng_of(options.seed, "words", region.dataset, region.sample_id), text.split()
    choices = []
    for _ in range(options.choices):
        stays = [rng.random() < options.kept for _ in range(WORDS)]
        some = [word for place, word in enumerate(words) if place >= WORDS or stays[place]]
        choices.append(" ".join(some) or text)
    return choices


def _sampled(seen: _Pictures, options: CaptionOptions) -> list[list[SelfCaption]]:
    """Sample captions of every region; return its distinct ones that end and have no mark and at least half
    as many words as is usual for the region: one word misleads nobody, so that it would score high."""
    model, regions = seen.model, seen.batch.samples
    requests = [caption_request(region, true_mask(region)) for region in regions]
    seeds = [
        seed_of(options.seed, "captions", region.dataset, region.sample_id, number)
        for region in regions
        for number in range(options.samples)
    ]
    answers = sample(
        model,
        prompt(model, requests, seen.encoded.vision),
        group=options.samples,
        max_tokens=options.max_tokens,
        reader=Reader(temperature=1.0, forbidden=[model.image_token_id], guard="guard"),
        seeds=seeds,
    )
    marks = set(model.tokenizer.get_added_vocab().values())  # [SEG] and the like, which are no words
    captions: list[dict[str, SelfCaption]] = [{} for _ in regions]
    for number, answer in enumerate(answers):
        ids = spoken_ids(model, list(answer.ids))
        text = text_of(model, ids)
        if answer.complete and text.strip(" .") and not marks & {*ids}:
            one = SelfCaption(text=text, logp=sum(answer.logps))
            captions[number // options.samples].setdefault(text, one)
    return [_not_short(list(own.values())) for own in captions]


def _not_short(captions: Sequence[SelfCaption]) -> list[SelfCaption]:
    least = median(len(one.text.split()) for one in captions) / 2 if captions else 0.0
    return [one for one in captions if len(one.text.split()) >= least]


def _encoded(model: Network, batch: RlBatch) -> _Pictures:
    """Encode each picture once, however many of the regions are in it."""
    batch = batch.to(model.device)
    frames = [region.frames for region in batch.samples]
    pictures = list(dict.fromkeys(frames))
    shown = batch.take([frames.index(picture) for picture in pictures])
    vision = model.vision_features(shown.views).split(shown.views)
    encoded = EncodedImages(vision=vision, frames=model.sam2.encode(shown.pixels))
    of_regions = encoded.take([pictures.index(picture) for picture in frames])
    return _Pictures(network=model, batch=batch, encoded=of_regions)


def _turned(batch: RlBatch, model: Network) -> RlBatch:
    """Turn the pictures and masks by 180 degrees."""
    images = [
        transforms.open_image(region.frames[0]).transpose(Image.Transpose.ROTATE_180)
        for region in batch.samples
    ]
    return replace(
        batch,
        views=[visible(model, [image]) for image in images],
        pixels=transforms.normalise(images, size=model.sam2.image_size),
        targets=batch.targets.flip((-2, -1)),
    )
