import numpy as np
import pytest

from ans_core.metrics.mask import ciou, giou
from ans_core.metrics.referring import Answer, answer, grefcoco, reasonseg, shares_above
from ans_core.pictures import rle

NOTHING = np.zeros((4, 5), bool)


def columns(start: int, end: int) -> np.ndarray:
    mask = NOTHING.copy()
    mask[:, start:end] = True
    return mask


def answers(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[Answer]:
    return [answer(rle.encode(drawn), rle.encode(real)) for drawn, real in pairs]


def test_grefcoco_by_hand():
    found = grefcoco(
        answers(
            [
                (columns(0, 4), columns(0, 5)),  # 16 of 20
                (NOTHING, columns(0, 2)),  # missed: 8 pixels in the union
                (NOTHING, NOTHING),  # rightly silent: IoU 1
                (columns(0, 1), NOTHING),  # 4 pixels in the union
            ]
        )
    )
    assert found == {
        "gIoU": pytest.approx((0.8 + 0 + 1 + 0) / 4),
        "cIoU": 16 / (20 + 8 + 4),
        "N_acc": 0.5,
        "T_acc": 0.5,
        "P@0.7": 0.5,
        "P@0.8": 0.5,  # 16 / 20 is enough
        "P@0.9": 0.0,
    }


def test_reasonseg_by_hand():
    found = reasonseg(answers([(columns(0, 4), columns(0, 5)), (NOTHING, NOTHING)]))
    assert found["gIoU"] == pytest.approx((16 / 20.00001 + 1) / 2.00001, abs=1e-15)
    assert found["cIoU"] == pytest.approx(16 / 20, abs=1e-10)


def test_shares_are_of_expressions_with_a_target():
    found = shares_above(answers([(columns(0, 1), columns(0, 2)), (NOTHING, NOTHING)]), (0.5, 0.6))
    assert found == {"P@0.5": 1.0, "P@0.6": 0.0}
    assert shares_above(answers([(NOTHING, NOTHING)]), (0.5,)) == {}


@pytest.mark.slow
def test_pooled_and_mean_iou_equal_a_slow_obvious_count_on_a_thousand_random_sets():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        pairs = [
            tuple(rng.uniform(size=(3, 4)) < rng.choice([0, 0.3, 0.8]) for _ in range(2))
            for _ in range(rng.integers(1, 4))
        ]
        found = answers(pairs)
        intersections, unions = [], []
        for drawn, real in pairs:
            cells = [(bool(drawn[y, x]), bool(real[y, x])) for y in range(3) for x in range(4)]
            intersections.append(sum(a and b for a, b in cells))
            unions.append(sum(a or b for a, b in cells))
        assert ciou(a.counts for a in found) == (sum(intersections) / sum(unions) if sum(unions) else 1.0)
        ious = [i / u if u else 1.0 for i, u in zip(intersections, unions, strict=True)]
        assert giou(a.counts for a in found) == sum(ious) / len(ious)
        assert [a.meant for a in found] == [bool(real.any()) for _, real in pairs]
        assert [a.predicted for a in found] == [bool(drawn.any()) for drawn, _ in pairs]
