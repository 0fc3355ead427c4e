"""Captions and their references -> CIDEr, equality, and whether they name the right attributes. (METEOR:
metrics/meteor.py.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pycocoevalcap.cider.cider import Cider

from ans_core.metrics.meteor import words


def cider(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return pycocoevalcap's CIDEr (not named CIDEr-D, but with its clipping and length penalty), 0 to 10,
    mean over captions.

    An n-gram's weight is log(number of captions scored / number of those whose references hold it): the
    references themselves are the corpus. So the number depends on which samples are scored together, and one
    caption alone always gets 0 (log 1). Tokens are metrics.meteor.words (lower case, no punctuation), not the
    Java PTB tokenizer's: plain sentences give the same tokens.
    """
    candidates = {i: [" ".join(words(text))] for i, text in enumerate(hypotheses)}
    real = {i: [" ".join(words(text)) for text in texts] for i, texts in enumerate(references)}
    if not any(text for texts in real.values() for text in texts):
        raise ValueError(f"CIDEr needs references with words in them; all {len(references)} are empty")
    return float(Cider().compute_score(real, candidates)[0])


def same_text(one: str, other: str) -> bool:
    """Tell whether texts are equal except for case, blanks and the final full stop."""
    return _plain(one) == _plain(other)


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).removesuffix(".").rstrip()


def attributes_right(
    hypotheses: Sequence[str], attributes: Sequence[Mapping[str, str]]
) -> list[dict[str, bool]]:
    """Tell per caption and attribute (`colour`: `red`) whether the right word is there, and none of the other
    values in any sample."""
    vocabulary: dict[str, set[str]] = {}
    for true in attributes:
        for key, value in true.items():
            vocabulary.setdefault(key, set()).add(value)
    return [
        {key: vocabulary[key] & set(words(text)) == {value} for key, value in true.items()}
        for text, true in zip(hypotheses, attributes, strict=True)
    ]
