from __future__ import annotations

import pytest

from perf.learn_formats import learn


@pytest.mark.slow
def test_conversations_of_several_turns_are_learned_as_their_reader_gives_them():
    """The cheapest set; `python perf/learn_formats.py` does all."""
    found = learn("llava", count=8, steps=150)
    assert found.enough, found
