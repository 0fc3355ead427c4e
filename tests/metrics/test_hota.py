import math

import numpy as np
import pytest

from ans_core.metrics.hota import Frame, hota, tracks


def frame(true: list[int], drawn: list[int], similarity: list[list[float]]) -> Frame:
    return Frame(
        true=true, predicted=drawn, similarity=np.array(similarity, float).reshape(len(true), len(drawn))
    )


def test_a_perfect_track_scores_one():
    found = hota([tracks([frame([0], [0], [[1]])] * 4)])
    assert found == pytest.approx(dict.fromkeys(found, 1.0))


def test_one_object_drawn_under_two_identities():
    """Every frame is matched, so detection is perfect; each identity holds half of the object's frames."""
    found = hota([tracks([frame([0], [0], [[1]])] * 2 + [frame([0], [1], [[1]])] * 2)])
    assert found["DetA"] == pytest.approx(1.0)
    assert found["AssA"] == found["AssRe"] == pytest.approx(0.5)  # 2 of the 4 frames of object or identity
    assert found["AssPr"] == pytest.approx(1.0)
    assert found["HOTA"] == pytest.approx(math.sqrt(0.5))


def test_misses_and_extras_are_pooled_over_sequences_and_a_match_counts_up_to_its_overlap():
    missed = tracks([frame([0], [], []), frame([0], [0], [[0.5]])])
    extra = tracks([frame([], [0, 1], [])])
    found = hota([missed, extra])
    reached = 10 / 19  # overlap .5 counts at .05, .1 .. .5
    assert found["DetRe"] == pytest.approx(reached * 1 / 2)
    assert found["DetPr"] == pytest.approx(reached * 1 / 3)
    assert found["DetA"] == pytest.approx(reached * 1 / 4)
    assert found["AssRe"] == pytest.approx(reached * 1 / 2)
    # 1 where nothing matches, as TrackEval has it
    assert found["LocA"] == pytest.approx((10 * 0.5 + 9 * 1) / 19)


def test_nothing_at_all():
    assert hota([tracks([])])["HOTA"] == 0.0
