"""perf/denial.py: which kind of absent thing an expression means, and the chance that a denial tells it from
what is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ans_core.data import scene_text as say
from ans_core.data.scenes import draw_scene
from ans_core.types import Sample
from perf.denial import KINDS, auc, kind_of, things_of


def thing(words: str) -> dict[str, str]:
    return dict(zip(("size", "colour", "texture", "shape"), words.split(), strict=True)) | {
        "place": "in the middle"
    }


THINGS = [thing("small red plain circle"), thing("large blue striped square")]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("the green circle", "colour"),  # a red circle is there; nothing is green
        ("the small red plain star", "shape"),
        ("the star", "shape"),
        ("the red square", "colour or shape"),  # a blue square and a red circle are there
        ("the small green dotted star", "neither"),
        # a large square is there; with another size it would fit too, which does not count
        ("the large circle", "shape"),
        ("the small red striped circle", "neither"),  # its texture alone is wrong
    ],
)
def test_an_absent_things_kind_is_the_word_without_which_something_there_fits(text: str, kind: str):
    assert kind_of(text, THINGS) == kind
    assert kind_of(text, []) == "unknown"


@pytest.mark.slow
def test_drawn_scenes_have_absent_things_of_every_kind():
    found = set()
    for index in range(200):
        scene = draw_scene(seed=0, split="test", index=index, image_size=32)
        expression = say.none_expression(np.random.default_rng(index), scene.things)
        if expression is not None:
            found.add(kind_of(expression.text, [say.attributes(one) for one in scene.things]))
    assert found == set(KINDS) - {"unknown"}


def test_a_pictures_things_are_its_regions_with_attributes():
    region = Sample(
        sample_id="1", dataset="d", image_id="i", frames=(Path("x.png"),), height=8, width=8,
        task="region_caption", text="a red circle", meta=THINGS[0],
    )  # fmt: skip
    others = [
        replace(region, frames=(Path("y.png"),), meta={}),
        replace(region, task="referring"),
        replace(region, meta=THINGS[1]),
    ]
    assert dict(things_of([region, *others])) == {Path("x.png"): THINGS}


def test_auc_counts_pairs_and_half_of_ties():
    # .9 above all three; .4 above one, one tie
    assert auc(np.array([0.9, 0.4]), np.array([0.1, 0.4, 0.5])) == pytest.approx(4.5 / 6)
    assert auc(np.array([0.9]), np.array([0.1])) == 1.0
    assert auc(np.array([0.1]), np.array([0.9])) == 0.0
