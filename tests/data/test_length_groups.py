"""Rows grouped by their length: true lengths, no row lost or repeated, the same tokens on every process."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from ans_core.data.collate import Row, collate_readable
from ans_core.data.conversation import turn
from ans_core.data.length_groups import LengthGroups, balanced, row_length
from ans_core.data.mixture import Mixture, Source
from ans_core.data.views import Patches, Tiling
from ans_core.model.network import Network
from tests import tiny


def mixed() -> Mixture:
    """Expressions of 1 to 40 words."""
    samples = [tiny.sample(i, text="word " * (1 + i * 13 % 40)) for i in range(48)]
    clips = [tiny.clip(100 + i) for i in range(4)]
    sources = [
        Source(name="one", kind="referring", samples=samples),
        Source(name="two", kind="video", samples=clips),
    ]
    return Mixture(sources, {"referring": 0.75, "video": 0.25}, questions=1, frames=3, seed=0, turn=turn)


def words(row: Row) -> int:
    return len(row.turns[0].question.split()) + 100 * (len(row.frames) > 1)


def names(rows: list[Row]) -> list[str]:
    return sorted(row.name + str(row.seed) for row in rows)


def test_a_window_has_the_rows_of_the_mixture_and_its_steps_have_rows_of_like_length():
    groups, plain = LengthGroups(mixed(), words, window=4), mixed()
    for first in (0, 4):
        steps = [groups.rows(step, 0, batch=8, micros=1) for step in range(first, first + 4)]
        expected = [row for step in range(first, first + 4) for row in plain.rows(step, 0, batch=8, micros=1)]
        assert names([row for step in steps for row in step]) == names(expected)
        lengths = [sorted(map(words, step)) for step in steps]
        assert lengths[0][-1] == max(map(words, expected))  # the longest first
        in_order = sorted(lengths)
        assert all(one[-1] <= other[0] for one, other in pairwise(in_order))
    assert LengthGroups(mixed(), words, window=4).rows(5, 0, batch=8, micros=1) == groups.rows(
        5, 0, batch=8, micros=1
    )


@pytest.mark.parametrize("micros", [1, 2])
def test_processes_share_a_steps_rows_with_about_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, micros: int
):
    alone = LengthGroups(mixed(), words, window=4)
    whole = {
        step: [row for micro in range(micros) for row in alone.rows(step, micro, batch=8, micros=micros)]
        for step in range(4)
    }
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared: dict[tuple[int, int], list[list[Row]]] = {}
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        groups = LengthGroups(mixed(), words, window=4)
        for step in range(4):
            for micro in range(micros):
                shared.setdefault((step, micro), []).append(groups.rows(step, micro, batch=8, micros=micros))
    for step in range(4):
        assert names(
            [row for micro in range(micros) for rows in shared[step, micro] for row in rows]
        ) == names(whole[step])
    for one, other in shared.values():
        assert len(one) == len(other) == 4 // micros
        tokens = [sum(map(words, rows)) for rows in (one, other)]
        spread = max(map(words, one + other)) - min(map(words, one + other))
        assert abs(tokens[0] - tokens[1]) <= spread


def test_rows_are_dealt_to_whoever_has_the_fewest_tokens():
    """9 | 8; 7 to the second (15); 3 to the first (12); 2 to the first (14), whose rows are complete; 1 to
    the second (16)."""
    assert balanced([(9, 0), (8, 1), (7, 2), (3, 3), (2, 4), (1, 5)], 2) == [[0, 3, 4], [1, 2, 5]]
    assert balanced([(5, 0), (4, 1), (3, 2)], 2) == [[0, 2], [1]] == balanced([(1, 0), (1, 1), (1, 2)], 2)
    assert balanced([(5, 7)], 3) == [[7], [], []]


CUTTERS = {
    "tiles": Tiling(size=64, max_tiles=6, grid=4),
    "patches": Patches(
        patch=8, merge=2, temporal=2, mean=(0.5,) * 3, std=(0.5,) * 3, min_pixels=1024, max_pixels=16384
    ),
}


@pytest.mark.parametrize("cutter", CUTTERS.values(), ids=CUTTERS)
def test_a_rows_length_is_that_of_its_packed_tokens_though_no_picture_is_opened(
    tiny_model: Network, cutter: Tiling | Patches
):
    """Pictures of one size and of another, a clip, regions, and a turn that is too long and is left out."""
    layout = replace(tiny.layout(tiny_model, max_length=400), cutter=cutter)
    file = io.BytesIO()
    Image.new("RGB", (192, 64)).save(file, "PNG")
    short, long = tiny.sample(1), tiny.sample(1, text="word " * 300)
    wide = tiny.sample(3, frames=(file.getvalue(),), width=192, masks=())
    for samples in ([short], [short, long], [tiny.region(1)], [tiny.clip(2)], [wide]):
        source = Source(name="set", kind="extra", samples=samples)
        row = Mixture([source], {"extra": 1.0}, questions=3, frames=3, seed=0, turn=turn).row(0)
        batch, left_out = collate_readable([row], tiny_model.tokenizer, layout)
        assert row_length(row, tiny_model.tokenizer, layout) == batch.input_ids.shape[1]
        assert len(left_out) == (long in samples)


def test_a_row_that_will_be_left_out_has_no_length(tiny_model: Network, tmp_path: Path):
    """A picture that is gone, and one that is too long and narrow for Qwen-VL."""
    layout = tiny.layout(tiny_model)
    narrow = tiny.row(size=(10, 3000))
    gone = tiny.row(size=(64, 64), frames=(tmp_path / "gone.png",) * 2, stills=True)
    assert row_length(narrow, tiny_model.tokenizer, replace(layout, cutter=CUTTERS["patches"])) == 0
    assert row_length(gone, tiny_model.tokenizer, layout) == 0
