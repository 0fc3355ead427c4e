"""Masks for captions that have none, which the model draws itself, and those words of each from which it draws
something else.

A caption says in several ways which thing it means, so what a model draws from all of it is right more often than
what it draws from some of its words. So the whole caption gives the mask, and SFT can teach the model to draw the
same from fewer words: a label from an easy view of the sample for a hard one (FixMatch, Sohn et al. 2020,
arXiv:2001.07685). Most choices of words teach little, as the model draws the same from them already; of several the
hardest are taken.

Whether a mask is right, the model as a captioner tells: the more likely it gives the mask this caption, the better
the mask. The mean log-probability of a token also prefers captions that are likely of anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core import prompts
from ans_core.benchmarks.loops import caption_request, expression_of
from ans_core.data.conversation import sentence
from ans_core.dist import rng_of
from ans_core.metrics.mask import pairwise_iou
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.rl.batch import rl_batch
from ans_core.rl.drawing import drawn, to_rle
from ans_core.rl.rollout import Reader, Segment, token_logps
from ans_core.rl.self_captions import Pictures, UnreadableError, encoded
from ans_core.rl.tokens import answers_of, hidden_states, question_segment, region_cells
from ans_core.types import RLE, Sample

TRIES = 60
"""Random choices of the words of a caption, of which those are kept that no other caption of the picture has."""


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """Which words of a caption are tried."""

    choices: int = 8
    """Choices of the words that the model draws from."""
    hardest: int = 3
    """Of these, those that are kept."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SelfMask:
    """The mask that a model draws from a caption."""

    mask: RLE
    fit: float
    """Mean log-probability of the caption's tokens, as the model's caption of the mask."""
    expressions: tuple[str, ...]
    """The whole caption, and the choices of its words from which the model draws the least alike."""


@torch.no_grad()
def self_masks(
    model: Network, phrases: Sequence[Sample], others: Sequence[Sequence[str]], options: MaskOptions
) -> list[SelfMask | None]:
    """Draw what each phrase means; None where nothing is drawn, where another phrase of the picture has all of its
    words, so that it could mean either, and for questions. What is random depends on the seed and the phrase alone.

    others: the texts of all other phrases of the same picture. Raises UnreadableError."""
    with model.inference_autocast():
        try:
            seen = encoded(model, rl_batch(phrases, [""] * len(phrases), model, mask_size=1))
        except ValueError as error:
            raise UnreadableError(str(error)) from error
        taken = [[words_of(other) for other in texts] for texts in others]
        asked = [
            (expression_of(phrase.text), *choices_of(phrase, words, options))
            for phrase, words in zip(phrases, taken, strict=True)
        ]
        answered, logits = drawn(seen, asked)
        of_text = dict(zip(answered, logits, strict=True))
        masks = [to_rle(seen, of_text[i, texts[0]], i) for i, texts in enumerate(asked)]
        shown = [i for i, mask in enumerate(masks) if rle.area(mask) and clear(asked[i][0], taken[i])]
        fits = dict(zip(shown, _fits(model, seen, shown, masks), strict=True))
    labels: list[SelfMask | None] = [None] * len(phrases)
    for i, fit in fits.items():
        whole, *texts = asked[i]
        hard = hardest({text: of_text[i, text] for text in texts}, of_text[i, whole], options)
        labels[i] = SelfMask(mask=masks[i], fit=fit, expressions=(whole, *hard))
    return labels


def words_of(text: str) -> set[str]:
    return {*expression_of(text).split()}


def choices_of(phrase: Sample, taken: Sequence[set[str]], options: MaskOptions) -> list[str]:
    """Return random choices of a phrase's words, in order, which no other phrase has all of: what they mean is
    clear as far as the picture has phrases. None for questions, and where there is no other phrase, for any word
    would do.

    taken: the words of each other phrase of the picture."""
    whole = expression_of(phrase.text)
    if not (taken and clear(whole, taken)):
        return []
    words = whole.split()
    rng = rng_of(options.seed, "words", phrase.dataset, phrase.sample_id)
    choices: dict[str, None] = {}
    for _ in range(TRIES):
        share = rng.uniform(0.15, 0.85)
        some = [word for word in words if rng.random() < share]
        text = " ".join(some)
        if len(choices) < options.choices and len(some) < len(words) and clear(text, taken):
            choices[text] = None
    return list(choices)


def clear(text: str, taken: Sequence[set[str]]) -> bool:
    """Tell whether a text has words, asks nothing, and no other phrase has all of its words."""
    words = {*text.split()}
    return bool(words) and "?" not in text and not any(words <= other for other in taken)


def hardest(
    choices: dict[str, Float[Tensor, "h w"]], whole: Float[Tensor, "h w"], options: MaskOptions
) -> list[str]:
    """Return the choices of words whose masks (logits) are least like that of the whole caption."""
    if not choices:
        return []
    texts, masks = list(choices), torch.stack(list(choices.values())) > 0
    order = pairwise_iou(masks, whole[None] > 0)[:, 0].argsort(stable=True).tolist()
    return [texts[place] for place in order[: options.hardest]]


def _fits(model: Network, seen: Pictures, some: Sequence[int], masks: Sequence[RLE]) -> list[float]:
    """Return of some phrases (their indices) how likely the model gives their masks these captions."""
    if not some:
        return []
    pictures = replace(seen, batch=seen.batch.take(some), encoded=seen.encoded.take(some))
    groups, regions = [], []
    for row, i in enumerate(some):
        phrase = pictures.batch.samples[row]
        cells = [region_cells(pictures, row, masks[i])]
        asked = prompts.plain_question(caption_request(phrase, masks[i]).text)
        question = question_segment(pictures, asked, [int(cells[0].sum())])
        ids = model.tokenizer.encode(sentence(phrase.text), add_special_tokens=False)
        groups.append(answers_of(pictures, row, question, [Segment(ids=tuple(ids), trainable=True)]))
        regions.append(cells)
    packed, hidden, phrase_of = hidden_states(pictures, groups, regions)
    reader = Reader(temperature=1.0, forbidden=[], guard="guard")
    logps, _ = token_logps(model, packed, hidden, reader)
    total = torch.zeros(len(some), device=logps.device).index_add(0, phrase_of, logps)
    return (total / phrase_of.bincount(minlength=len(some))).tolist()
