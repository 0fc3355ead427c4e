import json
import random
from pathlib import Path

import pytest
from nltk.translate.meteor_score import single_meteor_score

from ans_core.metrics.meteor import meteor, meteor_of_words, synonyms, words

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "meteor.json").read_text())["pairs"]


def test_every_pinned_pair_scores_what_nltk_gave_to_the_last_bit():
    assert len(GOLDEN) >= 100
    for pair in GOLDEN:
        assert meteor(pair["hypothesis"], pair["references"]) == pair["meteor"], pair


def test_identical_texts_score_one_minus_half_over_n_cubed():
    assert meteor("circle", ["circle"]) == 0.5
    assert meteor("red circle", ["red circle"]) == 0.9375
    assert meteor("A red circle!", ["a red circle"]) == pytest.approx(1 - 0.5 / 27)


def test_texts_without_common_words_and_empty_texts_score_zero():
    assert meteor("a dog", ["the cat"]) == meteor("", ["the cat"]) == meteor("the cat", [""]) == 0.0


def test_nltk_mode_looks_up_stems_and_surface_mode_the_words_themselves():
    assert meteor("car", ["automobile"]) == 0.0  # the stem "automobil" is not in WordNet
    assert meteor("car", ["automobile"], mode="surface") == 0.5
    assert meteor("bikes", ["bicycle"], mode="surface") == 0.5
    assert meteor("car", ["auto"]) == meteor("car", ["auto"], mode="surface") == 0.5


def test_surface_mode_does_not_match_words_that_merely_look_alike():
    assert meteor("red", ["green"], mode="surface") == meteor("circle", ["square"], mode="surface") == 0.0


def test_a_scrambled_text_is_punished_by_its_chunks():
    # all 3 words match in 3 chunks: 1 - .5 * 1
    assert meteor("c b a", ["a b c"]) == 0.5


def test_words_are_lower_case_without_punctuation():
    assert words("A T-shirt, the dog's; <b>3 legs</b>_x") == [
        "a",
        "t-shirt",
        "the",
        "dog's",
        "b",
        "3",
        "legs",
        "b",
        "x",
    ]


def test_irregular_forms_lead_to_their_base_and_to_its_synonyms():
    assert "goose" in synonyms("geese")
    assert "strip" in synonyms("comics")  # by way of comic_strip
    assert synonyms("xqzt") == {"xqzt"}


class Synset:
    """What NLTK's scorer asks of WordNet, answered from our table: so its own alignment is the oracle also
    where it has no WordNet."""

    def __init__(self, word: str):
        self.word = word

    def lemmas(self) -> list["Name"]:
        return [Name(name) for name in synonyms(self.word)]


class Name(str):
    def name(self) -> str:
        return str(self)


class Wordnet:
    def synsets(self, word: str) -> list[Synset]:
        return [Synset(word)]


def test_alignment_equals_nltks_on_random_texts():
    rng = random.Random(0)
    vocabulary = [word for pair in GOLDEN for word in words(pair["hypothesis"])]
    for _ in range(400):
        hypothesis, reference = (rng.choices(vocabulary, k=rng.randint(1, 25)) for _ in range(2))
        assert meteor_of_words(hypothesis, reference) == single_meteor_score(
            reference, hypothesis, wordnet=Wordnet()
        )
