import numpy as np
import pytest
import torch
from pycocoevalcap.cider.cider import Cider as PublicCider

from ans_core.metrics.mask import mask_iou, soft_iou
from ans_core.pictures import rle
from ans_core.rewards import REWARDS, corpus_rewards
from ans_core.rewards.confidence import MaskPrediction
from ans_core.rewards.iou import iou
from ans_core.types import Prediction


def box(start: int, end: int) -> dict:
    mask = np.zeros((3, 20), bool)
    mask[:, start:end] = True
    return rle.encode(mask)


TRUTHS = {
    0: Prediction(text="There is no such object."),
    1: Prediction(text="It is [SEG].", masks=((box(2, 9),),)),
    3: Prediction(
        text="<p> a dog </p> [SEG] and <p> a cat </p> [SEG] and <p> a dog </p> [SEG]",
        masks=((box(0, 5),), (box(5, 9),), (box(10, 20),)),
    ),
}


@pytest.mark.parametrize("objects", TRUTHS)
@pytest.mark.parametrize("name", REWARDS)
def test_the_truth_earns_exactly_one(name: str, objects: int):
    assert REWARDS[name](TRUTHS[objects], TRUTHS[objects]) == 1.0


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_lies_between_zero_and_one_and_tells_answers_apart(name: str):
    values = [REWARDS[name](answer, truth) for answer in TRUTHS.values() for truth in TRUTHS.values()]
    assert all(0.0 <= value <= 1.0 for value in values)
    assert min(values) < 0.5 or name == "confidence"  # which does not look at the truth


def test_confidence_is_the_drawings_own():
    assert (
        REWARDS["confidence"](MaskPrediction(text="", masks=((box(2, 9),),), confidence=0.75), TRUTHS[1])
        == 0.75
    )


def test_cider_is_the_benchmarks_where_the_corpus_is_its_references():
    """pycocoevalcap scores captions together, and weighs words by how many of their references hold them."""
    references = [
        "a small red circle at the top",
        "a large blue square",
        "a red square at the top left",
        "two striped triangles",
    ]
    told = ["a red circle at the top", "a large blue square", "a circle", "two striped triangles at the top"]
    reward = corpus_rewards(references, needed={"cider"})["cider"]
    _, expected = PublicCider().compute_score(
        {i: [r] for i, r in enumerate(references)}, {i: [t] for i, t in enumerate(told)}
    )
    _, best = PublicCider().compute_score(
        {i: [r] for i, r in enumerate(references)}, {i: [r] for i, r in enumerate(references)}
    )
    found = [reward(Prediction(text=t), Prediction(text=r)) for t, r in zip(told, references, strict=True)]
    assert found == pytest.approx([e / b for e, b in zip(expected, best, strict=True)])
    assert found[1] == 1.0
    assert 0 < found[2] < found[0] < 1
    assert reward(Prediction(text=""), Prediction(text=references[0])) == 0.0


def test_cider_counts_its_corpus_only_where_it_is_rewarded():
    assert corpus_rewards(["a circle"], needed={"meteor", "iou"}) == {}


def test_a_caption_like_all_others_is_worth_being_said_right():
    reward = corpus_rewards(["a circle"] * 3, needed={"cider"})["cider"]
    assert [
        reward(Prediction(text=text), Prediction(text="a circle"))
        for text in ("a circle", "A circle.", "a square")
    ] == [1.0, 1.0, 0.0]


def test_one_word_captions_reach_one_and_longer_ones_too():
    for text in ("circle", "red circle", "the the the", "a b c d e f g h i j k"):
        assert REWARDS["meteor"](Prediction(text=text), Prediction(text=text.upper())) == 1.0


def test_no_text_beats_the_truth():
    truth = Prediction(text="a small red circle")
    for text in ("a small red circle a small red circle", "a little red circle", "small red circle a", ""):
        assert REWARDS["meteor"](Prediction(text=text), truth) <= 1.0


def test_the_surface_reward_knows_synonyms_that_nltk_misses():
    one, other = Prediction(text="a car"), Prediction(text="an automobile")
    assert REWARDS["meteor_nltk"](one, other) == 0.0
    assert REWARDS["meteor"](one, other) > 0.0


def test_iou_counts_missing_and_superfluous_masks_as_zero():
    assert iou(Prediction(text="", masks=((box(0, 5),),)), TRUTHS[3]) == pytest.approx(1 / 3)
    assert iou(TRUTHS[1], TRUTHS[0]) == 0.0
    assert iou(Prediction(text="", masks=((box(2, 5),), (box(2, 9),))), TRUTHS[1]) == pytest.approx(3 / 7 / 2)


def test_iou_of_a_clip_pools_its_frames_and_skips_unannotated_ones():
    clip = Prediction(text="", masks=((box(0, 4), box(0, 4), box(0, 9)),))
    truth = Prediction(text="", masks=((box(0, 4), box(2, 4), None),))
    assert iou(clip, truth) == (4 + 2) / (4 + 4)


def test_tensor_iou_equals_the_one_on_run_lengths():
    masks, truth = torch.rand(4, 8, 8) > 0.5, torch.rand(4, 8, 8) > 0.5
    expected = [
        iou(*(Prediction(text="", masks=((rle.encode(m.numpy()),),)) for m in pair))
        for pair in zip(masks, truth, strict=True)
    ]
    assert mask_iou(masks, truth).tolist() == pytest.approx(expected)
    assert torch.allclose(soft_iou(masks.float(), truth), mask_iou(masks, truth))


def test_soft_iou_by_hand_and_on_empty_masks():
    probabilities, truth = torch.tensor([[0.5, 0.25]]), torch.tensor([[True, False]])
    assert soft_iou(probabilities, truth).item() == pytest.approx(0.5 / (0.75 + 1 - 0.5))
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert soft_iou(torch.zeros(2, 3), nothing).item() == mask_iou(nothing, nothing).item() == 1.0


def test_soft_iou_has_a_gradient_where_nothing_overlaps_yet():
    probabilities = torch.full((2, 2), 0.1, requires_grad=True)
    soft_iou(probabilities, torch.eye(2, dtype=torch.bool)).backward()
    assert probabilities.grad is not None
    assert probabilities.grad[0, 0] > 0 > probabilities.grad[0, 1]


def test_format_wants_the_right_number_of_masks_and_closed_phrases():
    reward = REWARDS["format"]
    good = TRUTHS[1]
    assert reward(Prediction(text="Sure, [SEG].", masks=good.masks), good) == 1.0
    assert reward(Prediction(text="Sure, [SEG]."), good) == 0.0
    # as in the loops: a mask beside a text that does not ask for one
    region = Prediction(text="a dog", masks=good.masks)
    assert reward(region, region) == 1.0
    assert reward(Prediction(text="a dog"), region) == 0.0
    assert reward(Prediction(text="[SEG][SEG]", masks=good.masks * 2), good) == 0.0
    assert reward(Prediction(text="<p> a [SEG]", masks=good.masks), good) == 0.0
    assert reward(Prediction(text="<p> a <p> b </p> </p> [SEG]", masks=good.masks), good) == 0.0
