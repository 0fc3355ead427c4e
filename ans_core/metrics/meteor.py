"""METEOR of two texts, as NLTK computes it (Lavie & Agarwal 2007), with WordNet 3.0's synonyms from a table
shipped in data/.

Not the Java METEOR 1.5 of COCO-style tables: the two differ by .2 and more on the same pair and must not be
compared.
"""

from __future__ import annotations

import functools
import itertools
import lzma
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nltk.stem.porter import PorterStemmer

Mode = Literal["nltk", "surface"]
"""nltk: bit-identical to nltk.translate.meteor_score, which looks synonyms up by STEM: car / automobile do
not match ("automobil"). surface: synonyms of the word as written and of its base forms; for rewards."""

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SUFFIXES = {
    "n": (
        ("s", ""), ("ses", "s"), ("ves", "f"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"),
        ("men", "man"),
        ("ies", "y"),
    ),
    "v": (("s", ""), ("ies", "y"), ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", "")),
    "a": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "r": (),
}  # fmt: skip
"""WordNet's detachment rules (man 7 morphy), in its order."""
_Pairs = list[tuple[int, int]]
_Words = list[tuple[int, str]]


def words(text: str) -> list[str]:
    """Return lower-cased words without punctuation; inner hyphens and apostrophes stay."""
    return _WORD.findall(text.lower())


def meteor(hypothesis: str, references: Sequence[str], *, mode: Mode = "nltk") -> float:
    """Return the best score over the references. Identical texts of n words score 1 - .5 / n^3 (n = 1: .5),
    not 1; no common word: 0."""
    return max(meteor_of_words(words(hypothesis), words(reference), mode=mode) for reference in references)


def meteor_of_words(hypothesis: Sequence[str], reference: Sequence[str], *, mode: Mode = "nltk") -> float:
    """Score words with alpha .9, beta 3, gamma .5. They must be lower-case without underscore (WordNet's mark
    of entries of several words)."""
    matches = _align(hypothesis, reference, mode)
    if not matches:
        return 0.0
    precision, recall = len(matches) / len(hypothesis), len(matches) / len(reference)
    fmean = (precision * recall) / (0.9 * precision + (1 - 0.9) * recall)
    chunks = 1 + sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in itertools.pairwise(matches))
    return (1 - 0.5 * (float(chunks) / len(matches)) ** 3.0) * fmean


@functools.lru_cache(maxsize=100_000)
def synonyms(word: str) -> frozenset[str]:
    """Return the word itself and every one-word synonym in every sense of every base form it can have."""
    table = _table()
    equivalents = {word}
    for pos, base in _bases(word):
        equivalents.update(table[base][pos])
    return frozenset(equivalents)


@functools.lru_cache(maxsize=100_000)
def _stem(word: str) -> str:
    return _stemmer().stem(word)


@functools.cache
def _stemmer() -> PorterStemmer:
    # loads all of NLTK and SciPy's statistics: seconds of every start
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()


@functools.lru_cache(maxsize=100_000)
def _bases(word: str) -> tuple[tuple[str, str], ...]:
    """Return (part of speech, base form in WordNet) of a word; irregular forms first consult WordNet's
    exception lists."""
    table = _table()
    bases = []
    for pos, suffixes in _SUFFIXES.items():
        irregular = table.get(word, {}).get(pos + "!")
        derived = (
            [word[: -len(old)] + new for old, new in suffixes if word.endswith(old)]
            if irregular is None
            else irregular
        )
        bases += [(pos, form) for form in dict.fromkeys([word, *derived]) if pos in table.get(form, {})]
    return tuple(bases)


@functools.cache
def _table() -> dict[str, dict[str, tuple[str, ...]]]:
    """Load word -> {part of speech: its own and its synonyms' names, part of speech + "!": base forms of an
    irregular form}."""
    packed = resources.files("ans_core.metrics").joinpath("data/synonyms.txt.xz").read_bytes()
    table: dict[str, dict[str, tuple[str, ...]]] = {}
    for line in lzma.decompress(packed).decode().splitlines():
        word, kind, others = line.split("\t")
        table.setdefault(word, {})[kind] = tuple(others.split())
    return table


def _align(hypothesis: Sequence[str], reference: Sequence[str], mode: Mode) -> _Pairs:
    """Match exact words, then stems, then synonyms: each hypothesis word, from the right, takes the LAST
    reference word still free (as NLTK)."""
    pairs: _Pairs = []
    ours, theirs = _match_equal(list(enumerate(hypothesis)), list(enumerate(reference)), pairs)
    ours, theirs = _match_equal(_stems(ours), _stems(theirs), pairs)
    if mode == "nltk":
        _match_synonyms(ours, [(j, (stem,)) for j, stem in theirs], pairs)
    else:
        of_word = [(j, {reference[j], *(base for _, base in _bases(reference[j]))}) for j, _ in theirs]
        _match_synonyms([(i, hypothesis[i]) for i, _ in ours], of_word, pairs)
    return sorted(pairs)


def _stems(numbered: _Words) -> _Words:
    return [(i, _stem(word)) for i, word in numbered]


def _match_equal(hypothesis: _Words, reference: _Words, pairs: _Pairs) -> tuple[_Words, _Words]:
    """Add to `pairs` the words that are equal, and return those left over."""
    places: dict[str, list[tuple[int, str]]] = {}
    for place in reference:
        places.setdefault(place[1], []).append(place)
    left: _Words = []
    for i, word in reversed(hypothesis):
        free = places.get(word)
        if free:
            pairs.append((i, free.pop()[0]))
        else:
            left.append((i, word))
    left.reverse()
    return left, sorted(itertools.chain.from_iterable(places.values()))


def _match_synonyms(
    hypothesis: _Words, reference: Sequence[tuple[int, Iterable[str]]], pairs: _Pairs
) -> None:
    """Add to `pairs` the words of which one's synonyms hold a form of the other. `reference` gives the forms
    of each word."""
    places: dict[str, list[int]] = {}
    for j, forms in reference:
        for form in forms:
            places.setdefault(form, []).append(j)
    taken: set[int] = set()
    for i, word in reversed(hypothesis):
        free = [j for form in synonyms(word).intersection(places) for j in places[form] if j not in taken]
        if free:
            taken.add(max(free))
            pairs.append((i, max(free)))
