import numpy as np
import pytest
import torch

from ans_core.metrics.mask import Counts, ciou, counts, giou, mask_iou, pairwise_iou, soft_iou
from ans_core.pictures import rle


def rows(*counts_of_columns: int) -> np.ndarray:
    return np.array([[column < count for column in range(4)] for count in counts_of_columns])


def test_counts_by_hand():
    prediction, truth = rle.encode(rows(2, 3, 0)), rle.encode(rows(1, 4, 0))
    assert counts(prediction, truth) == Counts(intersection=1 + 3, union=2 + 4)


def test_two_empty_masks_agree_and_one_empty_mask_does_not():
    assert counts(rle.empty(3, 4), rle.empty(3, 4)).iou == 1.0
    assert counts(rle.empty(3, 4), rle.encode(rows(1, 0, 0))).iou == 0.0


@pytest.mark.parametrize("array", [np.asarray, torch.from_numpy])
def test_stacks_of_masks_give_the_iou_of_each(array):
    ours = np.stack([rows(2, 3, 0), rows(0, 0, 0), rows(0, 0, 0), rows(4, 4, 4)])
    theirs = np.stack([rows(1, 4, 0), rows(0, 0, 0), rows(1, 0, 0), rows(4, 4, 4)])
    by_hand = [4 / 6, 1, 0, 1]
    masks, truth = array(ours), array(theirs)
    assert mask_iou(masks, truth).tolist() == pytest.approx(by_hand)
    assert soft_iou(masks * 1.0, truth).tolist() == pytest.approx(by_hand)  # probabilities 0 and 1
    assert mask_iou(masks.reshape(2, 2, 3, 4), truth.reshape(2, 2, 3, 4)).shape == (2, 2)
    every = pairwise_iou(masks, truth)
    coded, others = ([rle.encode(mask) for mask in stack] for stack in (ours, theirs))
    assert every.tolist() == [pytest.approx([counts(one, other).iou for other in others]) for one in coded]


def test_soft_iou_by_hand_and_its_gradient():
    probabilities = torch.tensor([[[0.5, 1.0]], [[0.0, 0.0]]], requires_grad=True)
    overlap = soft_iou(probabilities, torch.tensor([[[True, False]], [[False, False]]]))
    assert overlap.tolist() == [0.5 / 2, 1.0]  # .5 of the pixel asked for; .5 + 1 + 1 - .5 in the union
    overlap.sum().backward()
    assert probabilities.grad[0, 0, 0] == pytest.approx(0.5)  # d/dp of p / (1 + 1)
    assert soft_iou(probabilities.bfloat16(), torch.ones(2, 1, 2, dtype=torch.bool)).dtype == torch.bfloat16


def test_ciou_pools_pixels_and_giou_averages_samples():
    per_sample = [Counts(intersection=1, union=2), Counts(intersection=90, union=100), Counts()]
    assert ciou(per_sample) == 91 / 102
    assert giou(per_sample) == pytest.approx((0.5 + 0.9 + 1) / 3)


def test_masks_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"size \[3, 4\].*\[4, 3\]"):
        counts(rle.empty(3, 4), rle.empty(4, 3))
