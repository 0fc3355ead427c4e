import numpy as np
import pytest

from ans_core.metrics.clear_mot import ClearCounts, clear_counts, clear_mot
from ans_core.metrics.hota import Frame


def frame(true: list[int], drawn: list[int], similarity: list[list[float]]) -> Frame:
    return Frame(
        true=true, predicted=drawn, similarity=np.array(similarity, float).reshape(len(true), len(drawn))
    )


def test_a_perfect_track_has_mota_and_motp_one() -> None:
    found = clear_mot([clear_counts([frame([0, 1], [5, 7], [[1, 0], [0, 1]])] * 3)])
    assert found == {"MOTA": 1.0, "MOTP": 1.0, "ID_switches": 0.0}


def test_misses_extras_and_a_switch_are_counted_over_sequences() -> None:
    """6 true objects; 4 are matched (overlaps .5, .8, 1, .9), the last by another identity; 2 are missed; 1
    is extra."""
    first = clear_counts([frame([0], [0], [[0.5]]), frame([0], [0], [[0.49]]), frame([0], [0], [[0.8]])])
    assert first == ClearCounts(matched=2, missed=1, extra=1, overlap=1.3)
    second = clear_counts([frame([0], [], []), frame([0], [0], [[1.0]]), frame([0], [1], [[0.9]])])
    assert second == ClearCounts(matched=2, missed=1, switches=1, overlap=1.9)
    found = clear_mot([first, second])
    assert found["MOTA"] == pytest.approx(1 - (2 + 1 + 1) / 6)
    assert found["MOTP"] == pytest.approx(3.2 / 4)
    assert found["ID_switches"] == 1


def test_a_pair_stays_together_while_it_overlaps_and_a_switch_counts_across_a_gap() -> None:
    both = frame([0, 1], [0, 1], [[0.9, 0.1], [0.1, 0.9]])
    crossing = frame([0, 1], [0, 1], [[0.5, 0.95], [0.95, 0.5]])
    assert clear_counts([both, crossing]) == ClearCounts(matched=4, overlap=0.9 + 0.9 + 0.5 + 0.5)
    parted = frame([0, 1], [0, 1], [[0.4, 0.95], [0.95, 0.4]])
    assert clear_counts([both, parted]).switches == 2
    gap = [frame([0], [0], [[1.0]]), frame([0], [], []), frame([0], [1], [[1.0]])]
    assert clear_counts(gap) == ClearCounts(matched=2, missed=1, switches=1, overlap=2.0)


def test_more_extras_than_objects_make_mota_negative_and_nothing_at_all_is_zero() -> None:
    assert clear_mot([clear_counts([frame([0], [0, 1, 2], [[0.0, 0.1, 0.2]])])])["MOTA"] == -3
    assert clear_mot([]) == {"MOTA": 0.0, "MOTP": 0.0, "ID_switches": 0.0}
