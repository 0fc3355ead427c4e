import math

import pytest

from ans_core.metrics.text import coco_tokens, text_scores


def test_bleu_by_hand():
    # 4 words, "a b c" found: 3 of 4 words, 2 of 3 pairs, 1 of 2 triples; the closest reference is one word
    # longer
    found = text_scores(["a b c x"], [["a b c d e", "a b c d e f g h"]]).corpus
    brevity = math.exp(1 - 5 / 4)
    assert found["Bleu_1"] == pytest.approx(brevity * 3 / 4, abs=1e-8)
    assert found["Bleu_2"] == pytest.approx(brevity * (3 / 4 * 2 / 3) ** 0.5, abs=1e-8)
    assert found["Bleu_3"] == pytest.approx(brevity * (3 / 4 * 2 / 3 * 1 / 2) ** (1 / 3), abs=1e-8)


def test_rouge_takes_the_best_precision_and_the_best_recall_one_by_one():
    # "a c" in order in "a b c" (2 of 3), and "a" of "a" (1 of 1): precision 2/2, recall 1
    assert text_scores(["a c"], [["a b c", "a"]]).corpus["ROUGE_L"] == pytest.approx(1.0)
    # precision 1/2, recall 1/3: (1 + 1.44) p r / (r + 1.44 p)
    assert text_scores(["a x"], [["a b c"]]).corpus["ROUGE_L"] == pytest.approx(2.44 / 6 / (1 / 3 + 0.72))


def test_every_text_needs_a_reference():
    with pytest.raises(ValueError, match="needs a reference"):
        text_scores(["a"], [[]])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("A man, on a Dirt-road.", "a man on a dirt-road"),
        ("A cat's toy; it isn't new!", "a cat 's toy it is n't new"),
        ("Watching a t.v.", "watching a t.v."),
        ("A door (top and bottom)", "a door -lrb- top and bottom -rrb-"),
        ("On the table..", "on the table"),
        ("at Santa Fe St.", "at santa fe st."),
        ("It is going on. The end.", "it is going on the end"),
        ("", ""),
    ],
)
def test_coco_tokens(text: str, tokens: str):
    assert coco_tokens(text) == tokens
    assert coco_tokens(tokens) == tokens
