import numpy as np
import pytest

from ans_core.metrics.masklets import Group, average_precision, masklet_ious, phrase_figures
from ans_core.pictures import rle


def bar(length: int) -> dict:
    mask = np.zeros((2, 10), bool)
    mask[:, :length] = True
    return rle.encode(mask)


def group(scores: list[float], ious: list[list[float]], true: int) -> Group:
    return Group(scores=scores, ious=np.array(ious, float).reshape(len(scores), true))


def test_the_iou_of_masklets_sums_over_frames_before_it_divides():
    ious = masklet_ious([[bar(10), bar(0)], [bar(0), bar(0)]], [[bar(5), bar(5)], [bar(0), bar(0)]])
    assert ious.tolist() == [[10 / (20 + 10), 0.0], [0.0, 1.0]]
    assert masklet_ious([], [[bar(1)]]).shape == (0, 1)


def test_average_precision_by_hand():
    # best first: hit, miss, hit of two: precision 1 up to recall .5 (51 of 101 points), then 2/3 (50 points),
    # at every IoU
    found = average_precision({("v", "c"): group([0.9, 0.8, 0.7], [[1, 0], [0, 0], [0, 1]], 2)})
    assert found == pytest.approx(dict.fromkeys(("AP", "AP50", "AP75"), (51 + 50 * 2 / 3) / 101))
    # an IoU of .76 counts up to .75: 6 of 10 thresholds
    assert average_precision({("v", "c"): group([0.9], [[0.76]], 1)})["AP"] == pytest.approx(0.6)
    # categories without a truth don't count; the order of the file does not matter
    assert average_precision({("v", "c"): group([0.1, 0.9], [[0], [1]], 1), ("v", "d"): group([0.9], [], 0)})[
        "AP"
    ] == pytest.approx(1.0)


def test_phrase_figures_by_hand():
    found = phrase_figures(
        [
            # two hits at .5, one at .75; the third scores too little
            group([0.9, 0.6, 0.4], [[0.6, 0], [0, 0.8], [0, 1]], 2),
            group([0.9], [], 0),  # a false alarm: counts for IL_MCC alone
            group([], [], 0),
            group([0.2], [[1]], 1),  # missed
        ]
    )
    tp, fp, fn, tn = 1, 1, 1, 1
    assert found["IL_MCC"] == pytest.approx((tp * tn - fp * fn) / 4)
    assert found["precision_50"] == pytest.approx(2 / 2, abs=1e-4)
    assert found["recall_50"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["precision_75"] == pytest.approx(1 / 2, abs=1e-4)
    assert found["positive_micro_F1_75"] == pytest.approx(2 * (1 / 2) * (1 / 3) / (5 / 6), abs=2e-4)
    assert phrase_figures([group([0.9], [[1]], 1), group([], [], 0)])["cgF1"] == pytest.approx(1.0, abs=2e-4)
