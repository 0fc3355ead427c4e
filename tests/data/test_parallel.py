"""One function on many items side by side."""

from __future__ import annotations

import os
import signal
from itertools import islice

import pytest

from ans_core.data.parallel import in_order


def halved(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def ended(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_results_come_in_order_and_an_error_in_its_items_turn() -> None:
    begun = []

    def work(number: int) -> int:
        begun.append(number)
        return halved(number)

    assert list(in_order(halved, range(0, 100, 2), many=100, what="numbers")) == list(range(50))
    assert list(in_order(halved, [], many=1, what="numbers")) == []
    results = in_order(work, [*range(0, 200, 2), 1], many=1000, what="numbers", most=4)
    assert list(islice(results, 3)) == [0, 1, 2]
    assert len(begun) <= 3 + 6  # little is made before its turn
    with pytest.raises(ValueError, match="1 is odd"):
        list(results)


@pytest.mark.slow
def test_a_killed_process_is_told_with_what_it_read() -> None:
    with pytest.raises(
        RuntimeError, match=r"shards/train: one of . processes that read it was killed, .* memory"
    ):
        list(in_order(ended, range(8), many=1, what="shards/train"))
