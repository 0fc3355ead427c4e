"""METEOR against NLTK with the real WordNet 3.0: are all numbers the same, and how much faster is ours?

NLTK_DATA=... python perf/meteor.py        (perf/build_synonyms.py tells where WordNet's files come from)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from nltk.corpus import wordnet
from nltk.translate.meteor_score import single_meteor_score

from ans_core.metrics.meteor import meteor_of_words, synonyms

ENDINGS = ("", "s", "es", "ed", "ing", "er", "est", "ies")
PAIRS = 1000


def different_synonyms(vocabulary: list[str]) -> list[str]:
    wrong = []
    for word in vocabulary:
        names = {name for synset in wordnet.synsets(word) for name in synset.lemma_names() if "_" not in name}
        if synonyms(word) != {word, *(name for name in names if name == name.lower())}:
            wrong.append(word)
    return wrong


def pair(rng: random.Random, common: list[str], vocabulary: list[str]) -> tuple[list[str], list[str]]:
    """A text of 25 to 80 words and a paraphrase: words kept, replaced by synonyms, inflected, or dropped."""
    reference = [rng.choice(common if rng.random() < 0.8 else vocabulary) for _ in range(rng.randint(25, 80))]
    changed = [rng.choice((word, word, rng.choice(sorted(synonyms(word))), word + "s", rng.choice(common))) for word in reference]
    return [word for word in changed if rng.random() < 0.9], reference


def seconds(score: Callable[[list[str], list[str]], float], pairs: list[tuple[list[str], list[str]]]) -> tuple[float, list[float]]:
    start = time.perf_counter()
    scores = [score(hypothesis, reference) for hypothesis, reference in pairs]
    return time.perf_counter() - start, scores


def main() -> None:
    rng = random.Random(0)
    wordnet.ensure_loaded()
    vocabulary = sorted(name for name in wordnet.all_lemma_names() if "_" not in name)
    forms = [word + ending for word in rng.sample(vocabulary, 10_000) for ending in ENDINGS]
    forms += [form for pos in "nvar" for form in wordnet._exception_map[pos] if "_" not in form]
    print(f"synonyms of {len(forms)} word forms: {len(different_synonyms(forms))} differ from WordNet's")
    pairs = [pair(rng, rng.sample(vocabulary, 400), vocabulary) for _ in range(PAIRS)]
    ours, theirs = meteor_of_words, lambda hypothesis, reference: single_meteor_score(reference, hypothesis)
    synonyms.cache_clear()
    for temperature in ("cold", "warm"):  # cold: most stems and synonyms of these words are not cached yet
        our_time, our_scores = seconds(ours, pairs)
        their_time, their_scores = seconds(theirs, pairs)
        same = sum(a == b for a, b in zip(our_scores, their_scores, strict=True))
        print(
            f"{temperature}: {same} of {PAIRS} pairs bit-identical; ours {1e3 * our_time / PAIRS:.3f} ms a pair,"
            f" NLTK {1e3 * their_time / PAIRS:.3f} ms, {their_time / our_time:.1f} x"
        )


if __name__ == "__main__":
    main()
