"""A caption and the true caption -> METEOR divided by its best possible value, so that the truth itself earns
1."""

from __future__ import annotations

import functools

from ans_core.metrics.grounding import plain_caption
from ans_core.metrics.meteor import Mode, meteor, words
from ans_core.types import Prediction


def meteor_surface(answer: Prediction, truth: Prediction) -> float:
    """Score with synonyms of the word as written: car / automobile match. Use this for RL."""
    return normalised(answer.text, truth.text, mode="surface")


def meteor_nltk(answer: Prediction, truth: Prediction) -> float:
    """Score with NLTK's own matching, which looks synonyms up by stem."""
    return normalised(answer.text, truth.text, mode="nltk")


def normalised(text: str, reference: str, *, mode: Mode) -> float:
    """Return METEOR in [0, 1] for captions of any length. METEOR gives identical texts of n words 1 - .5 /
    n^3, its maximum (a single chunk is the least fragmentation), and the score is divided by that. Phrase
    tags and `[SEG]` are not words. Two texts without words = 1, one of them = 0."""
    hypothesis, real = plain_caption(text), plain_caption(reference)
    best = _best(real)
    return meteor(hypothesis, [real], mode=mode) / best if best else float(not words(hypothesis))


@functools.lru_cache(maxsize=10_000)
def _best(reference: str) -> float:
    """Return the score of the text with itself; computed, not taken from the formula, so that the truth earns
    exactly 1.0."""
    return meteor(reference, [reference])
