"""Captions for masks that have none, which the model makes itself from those words of its own samples that help it
to find the thing again.

Nobody has to judge a caption: the thing must be found again from it, as in loop 1. From a whole caption its place
alone finds it, nearly always, so a right colour is worth next to nothing. A random choice of the words has other
words to find it by, and in a turned picture words of place mislead.

Few samples have all words right, but nearly every right word is in some of them. So words are valued, not
captions, by a linear regression (ridge) of the IoU of what the model draws from a choice of words, over all choices
of all samples. The caption is then decoded greedily, and each token's log-probability is raised by value / kl the
first time that it is said. This approximates the likeliest caption of the policy to which RL with this reward and
this weight of the KL divergence converges, p(caption) exp(sum of values / kl). SFT on such captions is a step of
expectation maximization (ReST-EM, Singh et al. 2023, arXiv:2312.06585; RAFT, Dong et al. 2023, arXiv:2304.06767).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.dist import rng_of, seed_of
from ans_core.inference.decoding import decode
from ans_core.inference.generation import cut_at_stop, spoken_ids, stop_ids, stopping, text_of
from ans_core.inference.prefill import PrefilledBatch, prompt, visible
from ans_core.model.network import Network
from ans_core.pictures import transforms
from ans_core.rl.batch import EncodedBatch, EncodedImages, RlBatch, rl_batch
from ans_core.rl.drawing import drawn
from ans_core.rl.rollout import Reader, sample
from ans_core.types import Sample

MASK_SIDE = 256
"""Masks are compared at this size."""


@dataclass(frozen=True, kw_only=True)
class CaptionOptions:
    """How captions are sampled and made of the samples."""

    samples: int = 24
    """Captions of each mask."""
    kl: float = 0.05
    """IoU that a token must add to make up for one nat of log-probability."""
    min_p: float = 0.02
    """Tokens with less than this share of the likeliest one's probability are not said, whatever their value: a
    word can wait for its place."""
    max_tokens: int = 64
    choices: int = 3
    """Random choices of words of each sample, drawn from in the picture as it is and turned."""
    kept: float = 0.6
    """Chance of a word to stay."""
    ridge: float = 2.0
    """Weight of the squared values, in choices."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.kl < math.inf:
            raise ValueError(f"kl {self.kl:g}: the IoU a nat is finite and above 0")


@dataclass(frozen=True, kw_only=True)
class SelfCaption:
    """A caption of a mask, and how well the thing is found again from it."""

    text: str
    iou: float
    """Of the mask with what the model draws from the caption."""
    gain: float
    """Value of its tokens above the mean of the samples, as IoU of what is drawn from random choices of words.
    Where its place alone finds the thing (in the middle of the picture, which stays there as it is turned), all
    words are worth the same, and the choice says nothing."""


class UnreadableError(ValueError):
    """The picture or the mask of one of the samples can't be read."""


@dataclass(frozen=True, kw_only=True)
class Pictures(EncodedBatch):
    """Regions or phrases with their encoded pictures, and the model that labels them."""

    network: Network

    @property
    def model(self) -> Network:
        return self.network


@torch.no_grad()
def self_captions(
    model: Network, regions: Sequence[Sample], options: CaptionOptions
) -> list[SelfCaption | None]:
    """Caption the first mask of every region; None where no sample has a word, and where the caption does not
    end. What is random depends on the seed and the region alone. Raises UnreadableError."""
    with model.inference_autocast():
        try:
            seen = encoded(model, rl_batch(regions, [""] * len(regions), model, mask_size=MASK_SIDE))
            turned = encoded(model, _turned(seen.batch, model))
            requests = [caption_request(region, true_mask(region)) for region in regions]
            prompted = prompt(model, requests, seen.encoded.vision)
        except ValueError as error:
            raise UnreadableError(str(error)) from error
        samples = _sampled(model, prompted, regions, options)
        choices = [choices_of(own, region, options) for own, region in zip(samples, regions, strict=True)]
        as_is, upside_down = (drawn_ious(pictures, choices) for pictures in (seen, turned))
        values = [
            token_values(
                [_tokens(model, choice) for choice in own],
                [fmean(pair) for pair in zip(*ious, strict=True)],
                [_tokens(model, text) for text in texts],
                ridge=options.ridge,
            )
            for own, texts, *ious in zip(choices, samples, as_is, upside_down, strict=True)
        ]
        texts = _written(model, prompted, values, options)
        texts = [text if own else "" for text, own in zip(texts, samples, strict=True)]
        found = drawn_ious(seen, [[text] if text else [] for text in texts])
    return [
        SelfCaption(text=text, iou=ious[0], gain=_gain(model, text, own, value)) if text else None
        for text, ious, own, value in zip(texts, found, samples, values, strict=True)
    ]


def token_values(
    choices: Sequence[set[int]], ious: Sequence[float], texts: Sequence[set[int]], *, ridge: float
) -> dict[int, float]:
    """Return what each token adds to the IoU of what is drawn from words with it, by ridge regression.

    choices, ious: the tokens of each choice of words, and the IoU of what is drawn from it. texts: the tokens of
    the whole captions, whose mean value is 0, so that a longer caption is not worth more for its length."""
    ids = sorted(set().union(*choices, *texts))
    if not choices:
        return {}
    there = torch.tensor([[token in own for token in ids] for own in choices], dtype=torch.float64)  # (C, K)
    there -= there.mean(0)
    iou = torch.tensor(ious, dtype=torch.float64)
    penalty = ridge * torch.eye(len(ids), dtype=torch.float64)
    values = torch.linalg.solve(there.T @ there + penalty, there.T @ (iou - iou.mean())).tolist()
    of_token = dict(zip(ids, values, strict=True))
    mean = fmean(of_token[token] for token in chain.from_iterable(texts))
    return {token: value - mean for token, value in of_token.items()}


def _tokens(model: Network, text: str) -> set[int]:
    """Return a text's tokens as they stand after other words."""
    return {*model.tokenizer.encode(f" {text}", add_special_tokens=False)}


def _gain(model: Network, text: str, samples: Sequence[str], values: dict[int, float]) -> float:
    def value(words: str) -> float:
        return sum(values.get(token, 0.0) for token in _tokens(model, words))

    return value(text) - fmean(map(value, samples))


def drawn_ious(seen: Pictures, texts: Sequence[Sequence[str]]) -> list[list[float]]:
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


def choices_of(texts: Sequence[str], region: Sample, options: CaptionOptions) -> list[str]:
    """Return random choices of the words of each text, in order; the whole text where none would stay."""
    rng = rng_of(options.seed, "words", region.dataset, region.sample_id)
    choices = []
    for text in texts:
        for _ in range(options.choices):
            some = [word for word in text.split() if rng.random() < options.kept]
            choices.append(" ".join(some) or text)
    return choices


def _sampled(
    model: Network, prompted: PrefilledBatch, regions: Sequence[Sample], options: CaptionOptions
) -> list[list[str]]:
    """Sample captions of every region; return its distinct ones that end and have words and no mark."""
    seeds = [
        seed_of(options.seed, "captions", region.dataset, region.sample_id, number)
        for region in regions
        for number in range(options.samples)
    ]
    answers = sample(
        model,
        prompted,
        group=options.samples,
        max_tokens=options.max_tokens,
        reader=Reader(temperature=1.0, forbidden=[model.image_token_id], guard="guard"),
        seeds=seeds,
    )
    marks = {*_marks(model)}
    captions: list[dict[str, None]] = [{} for _ in regions]
    for number, answer in enumerate(answers):
        ids = spoken_ids(model, list(answer.ids))
        text = text_of(model, ids)
        if answer.complete and text.strip(" .") and not marks & {*ids}:
            captions[number // options.samples][text] = None
    return [list(own) for own in captions]


def _marks(model: Network) -> list[int]:
    """Return the ids of `[SEG]` and the like, which are no words; a turn may end with some."""
    return list(model.tokenizer.get_added_vocab().values())


def _written(
    model: Network, prompted: PrefilledBatch, values: Sequence[dict[int, float]], options: CaptionOptions
) -> list[str]:
    """Decode a caption of each region by the values of its tokens; "" where it does not end or has no word."""
    vocabulary = model.vlm.get_output_embeddings().weight.shape[0]
    bonus = torch.zeros(len(values), vocabulary, device=model.device)
    for row, own in zip(bonus, values, strict=True):
        row[list(own)] = torch.tensor(list(own.values()), device=model.device) / options.kl
    forbidden = torch.tensor([*({*_marks(model)} - {*stop_ids(model)})], device=model.device)

    def best(logits: Float[Tensor, "R V"], count: Tensor) -> Tensor:
        token = most_valued(logits.index_fill(1, forbidden, -torch.inf), bonus, min_p=options.min_p)
        bonus.scatter_(1, token[:, None], 0.0)  # said again, a word finds nothing more
        return token

    written = decode(
        model, prompted, answers=1, max_tokens=options.max_tokens, choose=best, **stopping(model)
    )
    texts = []
    for row in written.tolist():
        ids, ended = cut_at_stop(model, row)
        text = text_of(model, spoken_ids(model, ids))
        texts.append(text if ended and text.strip(" .") else "")
    return texts


def most_valued(
    logits: Float[Tensor, "R V"], bonus: Float[Tensor, "R V"], *, min_p: float
) -> Int[Tensor, " R"]:
    """Return of each row the token with the largest sum of logit and bonus, of those with at least `min_p` of the
    likeliest one's probability."""
    unlikely = logits < logits.amax(1, keepdim=True) + math.log(min_p)
    return (logits + bonus).masked_fill(unlikely, -torch.inf).argmax(1)


def encoded(model: Network, batch: RlBatch) -> Pictures:
    """Encode each picture once, however many of the samples are in it."""
    batch = batch.to(model.device)
    frames = [region.frames for region in batch.samples]
    pictures = list(dict.fromkeys(frames))
    shown = batch.take([frames.index(picture) for picture in pictures])
    vision = model.vision_features(shown.views).split(shown.views)
    images = EncodedImages(vision=vision, frames=model.sam2.encode(shown.pixels))
    of_samples = images.take([pictures.index(picture) for picture in frames])
    return Pictures(network=model, batch=batch, encoded=of_samples)


def _turned(batch: RlBatch, model: Network) -> RlBatch:
    """Turn the pictures and masks by 180 degrees."""
    opened = {
        frame: transforms.open_image(frame).transpose(Image.Transpose.ROTATE_180)
        for frame in {region.frames[0] for region in batch.samples}
    }
    images = [opened[region.frames[0]] for region in batch.samples]
    return replace(
        batch,
        views=[visible(model, [image]) for image in images],
        pixels=transforms.normalise(images, size=model.sam2.image_size),
        targets=batch.targets.flip((-2, -1)),
    )
