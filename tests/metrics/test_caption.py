import math

import pytest

from ans_core.metrics.caption import attributes_right, cider, same_text


def test_cider_of_the_references_themselves_is_ten_when_every_ngram_length_occurs():
    texts = ["a red circle on top", "the blue square below it", "one green star far away"]
    assert cider(texts, [[t] for t in texts]) == pytest.approx(10.0)


def test_cider_weighs_ngrams_by_how_many_references_hold_them():
    # two captions, words only (no 2-grams): df(a) = 2 -> weight 0; df(x) = df(y) = 1 -> log 2. Caption 1
    # right, caption 2 wrong: its own 1-gram cosine is 1, of 4 n-gram lengths; mean over lengths, times 10,
    # mean over captions
    assert cider(["x", "x"], [["x"], ["y"]]) == pytest.approx(10 * (1 / 4) / 2)
    assert cider(["a", "a"], [["a"], ["a"]]) == 0.0
    # one caption alone: every weight is log 1
    assert math.log(1) == cider(["a red circle"], [["a red circle"]])


def test_cider_refuses_references_without_words():
    with pytest.raises(ValueError, match="all 1 are empty"):
        cider(["x"], [["..."]])


def test_the_same_text_may_differ_in_case_blanks_and_the_final_full_stop():
    assert same_text("A small  red circle.", "a small red circle")
    assert same_text(" a red\ncircle .", "a red circle")
    assert not same_text("a red circle", "a red, circle")
    assert not same_text("a red circle..", "a red circle")


def test_an_attribute_is_right_if_its_word_is_named_and_no_rival():
    true = [{"colour": "red", "shape": "circle"}, {"colour": "blue", "shape": "square"}, {"colour": "red"}]
    told = ["a Red circle.", "a blue circle", "a red or blue thing"]
    assert attributes_right(told, true) == [
        {"colour": True, "shape": True},
        {"colour": True, "shape": False},
        {"colour": False},
    ]
