"""What training does with rows that can't be read or are too long."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ans_core.data.collate import Batch, LeftOut, collate, collate_readable, forced
from ans_core.data.conversation import Turn
from ans_core.data.left_out import LeftOutFile
from ans_core.model.network import Network
from tests import tiny

SHORT = Turn(question="Where?", answer="[SEG]", masks=((tiny.square(8, 8, 24, 24),),))
LONG = Turn(question="Where? " * 600, answer="[SEG]", masks=((tiny.square(0, 0, 8, 8),),))
BROKEN = replace(tiny.row(SHORT, SHORT, number=1), frames=(tiny.picture(1)[:200],))


@pytest.fixture(scope="module")
def model() -> Network:
    return tiny.build()


def same(one: Batch, other: Batch) -> bool:
    fields = [(getattr(one, name), getattr(other, name)) for name in Batch.__dataclass_fields__]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b) for a, b in fields)


def test_rows_that_can_be_read_are_collated_as_if_the_others_were_not_there(model: Network):
    layout, good = tiny.layout(model), [tiny.row(SHORT), tiny.row(SHORT, SHORT, number=2)]
    for bad in (BROKEN, replace(BROKEN, frames=(Path("nowhere.png"),))):
        with pytest.raises(ValueError, match="image"):
            collate([good[0], bad, good[1]], model.tokenizer, layout)
        batch, left_out = collate_readable([good[0], bad, good[1]], model.tokenizer, layout)
        assert same(batch, collate(good, model.tokenizer, layout))
        assert [(found.row, found.samples) for found in left_out] == [("drawn/i1", 2)]


def test_a_picture_that_was_replaced_by_one_of_another_size_is_left_out(model: Network):
    """The index holds the size that its masks were made for; the file is not looked at again before it is
    trained on."""
    layout = tiny.layout(model)
    _, left_out = collate_readable(
        [tiny.row(SHORT, size=(64, 64)), tiny.row(SHORT, number=2, size=(64, 65))], model.tokenizer, layout
    )
    assert [(found.row, found.samples) for found in left_out] == [("drawn/i2", 1)]
    assert "of (64, 64) pixels was of (65, 64) when it was annotated" in left_out[0].reason


def test_turns_that_are_too_long_leave_the_others_of_their_row(model: Network):
    layout = tiny.layout(model)
    batch, left_out = collate_readable(
        [tiny.row(SHORT, LONG, SHORT), tiny.row(LONG, number=2)], model.tokenizer, layout
    )
    assert same(batch, collate([tiny.row(SHORT, SHORT)], model.tokenizer, layout))
    assert [(found.row, found.samples) for found in left_out] == [("drawn/i0", 1), ("drawn/i2", 1)]
    assert all("> max_length 512" in found.reason for found in left_out)


def test_a_batch_without_any_row_is_one_picture_without_targets_that_a_model_reads(model: Network):
    batch, left_out = collate_readable([BROKEN], model.tokenizer, tiny.layout(model))
    assert len(left_out) == len(batch.input_ids) == len(batch.views) == 1
    assert not batch.loss_mask.any()
    assert len(batch.pair_seg) == len(batch.targets) == len(batch.sam_frames) == 0
    features = model.project(model.vision_features(batch.views))
    assert (batch.input_ids == model.tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")).sum() == len(
        features.values
    )


def test_what_was_left_out_is_named_in_a_file_and_counted_by_step_once_also_after_resuming(tmp_path: Path):
    """Two writers of one file, as loader workers are; step 3 is made again by a resumed run."""
    path = tmp_path / "scratch" / "left_out-0.jsonl"
    one, worker = LeftOutFile(path, rows=2), LeftOutFile(path, rows=2)
    assert one.count(0) == (0, 0)
    worker.add(1, [LeftOut(row="d/a", samples=2, reason="cut"), LeftOut(row="d/b", samples=1, reason="long")])
    worker.add(3, [LeftOut(row="d/c", samples=4, reason="cut")])
    assert [one.count(step) for step in (1, 2, 3)] == [(3, 0), (0, 0), (4, 0)]
    LeftOutFile(path, rows=2).add(3, [LeftOut(row="d/c", samples=4, reason="cut")])
    resumed = LeftOutFile(path, rows=2)
    assert [resumed.count(step) for step in (3, 4)] == [(4, 0), (0, 0)]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "step": 1,
        "row": "d/a",
        "samples": 2,
        "reason": "cut",
        "unreadable": False,
    }


def test_a_line_that_a_machine_cut_when_it_went_down_does_not_stop_those_after_it(tmp_path: Path):
    path = tmp_path / "left_out-0.jsonl"
    lost = [LeftOut(row=f"d/{n}", samples=2, reason="cut") for n in range(2)]
    LeftOutFile(path, rows=2).add(1, lost)
    path.write_bytes(path.read_bytes()[:-30])
    reader = LeftOutFile(path, rows=2)
    assert reader.count(0) == (0, 0)  # it may be a line that is being written
    for _ in range(2):
        LeftOutFile(path, rows=2).add(1, lost)
    assert reader.count(1) == LeftOutFile(path, rows=2).count(1) == (4, 0)


def test_more_than_ten_steps_in_a_row_of_mostly_unreadable_rows_end_the_run(tmp_path):
    left_out = LeftOutFile(tmp_path / "left_out.jsonl", rows=4)
    lost = [LeftOut(row=f"d/{n}", samples=2, reason="503", unreadable=n < 3) for n in range(4)]
    for step in range(25):  # half, most and, at step 12, none of the rows
        left_out.add(step, [] if step == 12 else lost[:3] if step > 1 else lost[1:])
    cpu = torch.device("cpu")
    assert [left_out.metrics(step, cpu) for step in range(23)] == [
        {} if step == 12 else {"skipped_samples": 6.0} for step in range(23)
    ]
    with pytest.raises(RuntimeError, match=r"in 11 steps in a row, up to step 23, .*left_out.jsonl has the"):
        left_out.metrics(23, cpu)


def test_a_row_may_be_forced_to_five_masks_as_upstream_does(model: Network):
    """Two masks come again in turn, with points of their own; of seven, five different ones are drawn, the
    same every time."""
    assert forced([3, 3, 4], 5, seed=0) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]
    drawn = forced(list(range(7)), 5, seed=0)
    assert len({pair for pair, copy in drawn if copy == 0}) == 5
    assert drawn == forced(list(range(7)), 5, seed=0)
    assert forced([], 5, seed=0) == []
    two = (tiny.square(8, 8, 24, 24),), (tiny.square(30, 30, 50, 60),)
    turns = (
        Turn(question="Both?", answer="[SEG] and [SEG]", masks=two),
        Turn(question="None?", answer="No."),
    )
    layout = replace(tiny.layout(model), objects=5)
    batch = collate(
        [tiny.row(*turns), tiny.row(turns[1], number=1), tiny.row(*turns, number=2)], model.tokenizer, layout
    )
    assert batch.pair_seg.tolist() == [0, 1, 0, 1, 0, 2, 3, 2, 3, 2]
    assert batch.pair_frame.tolist() == [0] * 5 + [1] * 5
    assert len(set(batch.pair_seeds[:5])) == 5
    assert torch.equal(batch.targets[0], batch.targets[2])
    assert not torch.equal(batch.targets[0], batch.targets[1])
