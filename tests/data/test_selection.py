"""What RL selects of data sets of any size: the same from an index as from a list, and a few numbers a sample
in memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ans_core.data.index import nameless_index
from ans_core.data.selection import Expressions, Joined
from ans_core.pictures import rle
from ans_core.rl.dual_loop import LOOPS
from ans_core.stages.rl_batches import rows_of, samples_by_loop
from ans_core.types import Sample
from tests import tiny

LEFT, RIGHT, NOTHING = tiny.square(0, 0, 8, 8), tiny.square(8, 8, 16, 16), rle.empty(64, 64)
SAMPLES = [
    tiny.region(0, "a red square", masks=((LEFT,),)),
    tiny.region(0, "both", masks=((LEFT,), (RIGHT,))),
    tiny.sample(0, task="referring", text="the left one", masks=((LEFT,),)),
    tiny.sample(0, task="referring", text="nothing", masks=()),
    tiny.sample(0, task="referring", text="not annotated", masks=((None,),)),
    tiny.sample(1, task="tracking", text="", masks=((LEFT,), (NOTHING,), (RIGHT,))),
    tiny.clip(2, task="tracking", text=""),
    tiny.clip(3, task="referring"),
    tiny.sample(4, task="phrase", text="a dog", masks=()),
    tiny.sample(5, task="conversation", text="yes", question="is it?", masks=()),
]


def test_an_index_gives_what_a_list_gives_and_that_is_what_the_loops_take(tmp_path: Path) -> None:
    listed = Joined([SAMPLES[:4], [], SAMPLES[4:]])
    indexed = Joined([nameless_index(SAMPLES, dataset="tiny", parent=tmp_path)])
    names = ("caption", "mask", "refer", "vqa")
    for options in (
        {},
        {"wordless": True},
        {"maskless": True},
        {"wordless": True, "maskless": True, "absent": 0.5},
    ):
        one, other = (samples_by_loop(joined, names, **options) for joined in (listed, indexed))
        assert one.of == other.of
        for of_list, of_index in zip(one.samples, other.samples, strict=True):
            assert [plain(s) for s in of_list] == [plain(s) for s in of_index]
            assert Expressions(of_list, listed)[:] == Expressions(of_index, indexed)[:]
    for name in names:
        assert listed.where(LOOPS[name].takes).tolist() == [
            n for n, sample in enumerate(SAMPLES) if LOOPS[name].takes(sample)
        ]
    (regions,) = samples_by_loop(listed, ("caption",), wordless=True).samples
    assert [(s.sample_id, s.text) for s in regions][1:] == [
        (f"{SAMPLES[5].sample_id}/{place}", "") for place in (0, 2)
    ]
    assert Expressions(regions, listed)[:] == [["the left one"], [], []]


def plain(sample: Sample) -> str:
    return json.dumps([sample.sample_id, sample.task, sample.text, sample.masks])


def many(count: int) -> Iterator[Sample]:
    for number in range(count):
        of = (
            tiny.region(number % 2, f"thing {number}", masks=((LEFT,),))
            if number % 2
            else replace(SAMPLES[2], text=f"the {number}")
        )
        yield replace(of, sample_id=str(number))


@pytest.mark.slow
def test_a_sample_takes_less_than_150_bytes(tmp_path: Path) -> None:
    """0.15 GB for a million."""
    count = 4000
    index = nameless_index(many(count), dataset="tiny", parent=tmp_path)
    tracemalloc.start()
    joined = Joined([index])
    practice = samples_by_loop(joined, ("caption", "mask", "refer"))
    expressions = [Expressions(samples, joined) for samples in practice.samples]
    rows = [rows_of(len(samples), step, batch=8, seed=0) for samples in practice.samples for step in range(2)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 * count + 200_000  # what is imported and opened takes as much for any number
    assert len(practice.samples[0]) == count // 2
    assert sorted(rows[0]) != rows[0]
    assert len(expressions[0][0]) == 0
