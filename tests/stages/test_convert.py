"""What the stage `convert` asks both models."""

from __future__ import annotations

from pathlib import Path

import pytest

from ans_core.data.mixture import Source
from ans_core.stages import convert
from tests import tiny


@pytest.mark.parametrize(
    ("samples", "prompted"),
    [
        ([tiny.sample(0), tiny.region(1), tiny.region(2, masks=((tiny.square(0, 0, 9, 9),),) * 2)], [1, 0]),
        (
            [tiny.sample(0), tiny.clip(1), tiny.sample(2, task="conversation", question="Why?", text="So.")],
            [0, 0],
        ),
    ],
)
def test_regions_are_probed_in_both_directions_and_other_data_by_its_own_questions(
    samples: list, prompted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        convert.data, "sources", lambda path, split: [Source(name="mine", kind="extra", samples=samples)]
    )
    probes = convert.probes(tmp_path, "val")
    assert [len(request.mask_prompts) for request in probes] == prompted
    assert all(len(request.frames) == 1 and not request.is_clip for request in probes)
