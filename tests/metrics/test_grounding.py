import numpy as np
import pytest

from ans_core.metrics.grounding import ground, phrases, plain_caption, token_f1
from ans_core.pictures import rle
from ans_core.prompts import interleave


def bar(start: int, end: int) -> dict:
    mask = np.zeros((2, 20), bool)
    mask[:, start:end] = True
    return rle.encode(mask)


def test_phrases_and_caption_are_read_back_from_upstreams_answer():
    caption, spans = "A cat sits on a mat.", ((0, 5), (14, 19))
    text = interleave(caption, spans)
    assert text == "<p> A cat </p> [SEG] sits on <p> a mat </p> [SEG]."
    assert phrases(text) == ["A cat", "a mat"]
    assert plain_caption(text) == caption


def test_a_seg_without_phrase_has_an_empty_one():
    assert phrases("It is [SEG]. <p> a dog </p> runs [SEG] [SEG]") == ["", "a dog", ""]
    # a model's answer: never closed, and still two masks
    assert phrases("<p> a dog [SEG] on <p> a mat </p> [SEG]") == ["", "a mat"]


def test_the_best_pairs_are_matched_first_and_one_to_one():
    # IoUs: drawn 0 with true 0: 10/10; drawn 1 with true 0: 8/10; drawn 1 with true 1: 0
    match = ground(
        drawn=[bar(0, 10), bar(0, 8)],
        drawn_phrases=["a", "a"],
        true=[bar(0, 10), bar(12, 20)],
        true_phrases=["a", "b"],
    )
    assert match.ious == (1.0,)
    assert match.miou == 1.0
    assert match.miou_all == 0.5


def test_recall_needs_overlap_and_a_like_phrase_and_stops_at_the_first_failure():
    true, names = [bar(0, 10), bar(10, 20)], ["the red circle", "the blue square"]
    drawn = [bar(0, 10), bar(10, 18)]
    assert (
        ground(
            drawn=drawn, drawn_phrases=["a red circle", "blue square"], true=true, true_phrases=names
        ).recalled
        == 2
    )
    assert (
        ground(drawn=drawn, drawn_phrases=["a red circle", "a dog"], true=true, true_phrases=names).recalled
        == 1
    )
    assert (
        ground(drawn=drawn, drawn_phrases=["a dog", "blue square"], true=true, true_phrases=names).recalled
        == 0
    )
    always = ground(
        drawn=drawn, drawn_phrases=["", ""], true=true, true_phrases=names, similarity=lambda a, b: 1.0
    )
    assert always.recalled == 2


def test_nothing_to_find():
    none = ground(drawn=[], drawn_phrases=[], true=[], true_phrases=[])
    assert none.miou == none.miou_all == 1.0
    extra = ground(drawn=[bar(0, 3)], drawn_phrases=["x"], true=[], true_phrases=[])
    assert extra.miou == extra.miou_all == 0.0


def test_token_f1_counts_common_words():
    assert token_f1("the red circle", "a red circle") == pytest.approx(4 / 6)
    assert token_f1("", "") == 0.0
