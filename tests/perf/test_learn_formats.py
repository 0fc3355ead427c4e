from __future__ import annotations

import pytest

from perf.learn_formats import learn


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "steps", "clicks"), [("llava", 8, 150, 0), ("coco", 6, 240, 150)])
def test_texts_and_masks_are_learned_as_their_readers_give_them(
    name: str, count: int, steps: int, clicks: int
) -> None:
    """A set of each kind, with several objects of one picture; `python perf/learn_formats.py` does 64 samples
    of all sets."""
    found = learn(name, count=count, steps=steps, clicks=clicks)
    assert found.enough, found
