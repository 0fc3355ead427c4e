from __future__ import annotations

import pytest

from perf.learn_formats import learn


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "steps"), [("llava", 8, 150), ("reasonseg", 2, 60)])
def test_texts_and_masks_are_learned_as_their_readers_give_them(name: str, count: int, steps: int) -> None:
    """The cheapest set of each kind; `python perf/learn_formats.py` does all."""
    found = learn(name, count=count, steps=steps)
    assert found.enough, found
