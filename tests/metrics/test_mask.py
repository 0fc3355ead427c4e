import jaxtyping
import numpy as np
import pytest

from ans_core import rle
from ans_core.metrics.mask import Counts, ciou, counts, giou


def rows(*counts_of_columns: int) -> np.ndarray:
    return np.array([[column < count for column in range(4)] for count in counts_of_columns])


def test_counts_are_the_same_from_arrays_and_from_rle():
    prediction, truth = rows(2, 3, 0), rows(1, 4, 0)
    expected = Counts(intersection=1 + 3, union=2 + 4)
    assert counts(prediction, truth) == counts(rle.encode(prediction), rle.encode(truth)) == expected


def test_two_empty_masks_agree_and_one_empty_mask_does_not():
    assert counts(rle.empty(3, 4), rle.empty(3, 4)).iou == 1.0
    assert counts(rle.empty(3, 4), rle.encode(rows(1, 0, 0))).iou == 0.0


def test_ciou_pools_pixels_and_giou_averages_samples():
    per_sample = [Counts(intersection=1, union=2), Counts(intersection=90, union=100), Counts()]
    assert ciou(per_sample) == 91 / 102
    assert giou(per_sample) == pytest.approx((0.5 + 0.9 + 1) / 3)


def test_masks_of_different_sizes_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"size \[3, 4\].*\[4, 3\]"):
        counts(rle.empty(3, 4), rle.empty(4, 3))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # on in tests, it would be the first to object
    with pytest.raises(ValueError, match="two boolean masks"):
        counts(np.zeros((2, 2), bool), np.zeros((2, 3), bool))
