"""A caption and the true caption -> CIDEr with n-grams weighed by a corpus given beforehand, divided by its best possible value."""

from __future__ import annotations

from collections.abc import Sequence

from pycocoevalcap.cider.cider_scorer import CiderScorer

from ans_core.metrics.grounding import plain_caption
from ans_core.metrics.meteor import words
from ans_core.rewards.kinds import Reward
from ans_core.types import Prediction


def cider_of(corpus: Sequence[str]) -> Reward:
    """The benchmark's CIDEr takes the captions scored together as its corpus, so that one caption alone gets 0; a reward must not depend on
    what happens to be in its batch. Rare words count most; words in every caption of the corpus count nothing. Tokens as in
    `metrics.caption.cider`. In [0, 1]: 10 is never reached by a caption shorter than four words, so the truth's own score is the measure.
    """
    counted = CiderScorer()
    for caption in corpus:
        counted.cook_append(None, [_tokens(caption)])
    counted.compute_doc_freq()

    def score(text: str, reference: str) -> float:
        scorer = CiderScorer(text, [reference])
        scorer.crefs += [{}] * (len(corpus) - 1)  # the scorer takes the corpus's size from here, and scores only what it has a text for
        scorer.document_frequency = counted.document_frequency
        return float(scorer.compute_cider()[0])

    def cider(answer: Prediction, truth: Prediction) -> float:
        """Where the true caption has no word that tells it from others, being equal to it is all there is to reward."""
        text, reference = _tokens(answer.text), _tokens(truth.text)
        best = score(reference, reference)
        return min(score(text, reference) / best, 1.0) if best > 0 else float(text == reference)

    return cider


def _tokens(text: str) -> str:
    return " ".join(words(plain_caption(text)))
