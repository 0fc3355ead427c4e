"""A caption and the true caption -> CIDEr with n-grams weighted by a given corpus, divided by its best
possible value."""

from __future__ import annotations

from collections.abc import Sequence

from pycocoevalcap.cider.cider_scorer import CiderScorer

from ans_core.metrics.grounding import plain_caption
from ans_core.metrics.meteor import words
from ans_core.rewards.kinds import Reward
from ans_core.types import Prediction


def cider_of(corpus: Sequence[str]) -> Reward:
    """Return the reward, in [0, 1], with fixed corpus weights.

    The benchmark's CIDEr uses the captions scored together as its corpus, so one caption alone gets 0; a
    reward must not depend on the rest of its batch. Rare words count most; words in every caption of the
    corpus count nothing. Tokens as in `metrics.caption.cider`. A caption shorter than four words never
    reaches CIDEr's 10, so the score is divided by the truth's own score.
    """
    counted = CiderScorer()
    for caption in corpus:
        counted.cook_append(None, [_tokens(caption)])
    counted.compute_doc_freq()

    def score(text: str, reference: str) -> float:
        scorer = CiderScorer(text, [reference])
        # the scorer takes the corpus size from here, and scores only entries with a text
        scorer.crefs += [{}] * (len(corpus) - 1)
        scorer.document_frequency = counted.document_frequency
        return float(scorer.compute_cider()[0])

    def cider(answer: Prediction, truth: Prediction) -> float:
        """Score a caption. If no word of the true caption distinguishes it from others, only an equal caption
        is rewarded."""
        text, reference = _tokens(answer.text), _tokens(truth.text)
        best = score(reference, reference)
        return min(score(text, reference) / best, 1.0) if best > 0 else float(text == reference)

    return cider


def _tokens(text: str) -> str:
    return " ".join(words(plain_caption(text)))
