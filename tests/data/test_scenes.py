"""The embedded world: what is drawn, and that every text about it is true."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ans_core.data import scene_text as say
from ans_core.data.clips import clip_expressions, draw_clip
from ans_core.data.scene_text import Query, resolve
from ans_core.data.scenes import SHAPES, Scene, Thing, background, draw_scene, random_thing, render
from ans_core.pictures.colours import COLOURS


def thing(
    shape: str, colour: str, x: float, y: float, *, size: str = "small", texture: str = "plain"
) -> Thing:
    drawn = random_thing(np.random.default_rng(0), shape=shape, colour=colour, size=size)
    return dataclasses.replace(drawn, x=x, y=y, texture=texture)


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(seed=3, split="val", index=i, image_size=128) for i in range(120)]


def test_a_scene_depends_on_seed_split_and_index_alone():
    first, again = (draw_scene(seed=1, split="train", index=5, image_size=64) for _ in range(2))
    assert first.things == again.things
    assert (first.image == again.image).all()
    for seed, split, index in ((2, "train", 5), (1, "val", 5), (1, "train", 6)):
        assert draw_scene(seed=seed, split=split, index=index, image_size=64).things != first.things


def test_a_square_is_drawn_with_exactly_its_pixels():
    square = dataclasses.replace(
        thing("square", "red", 0.5, 0.5), angle=0.0, radius=0.25 * 2**0.5, rgb=(200, 10, 20)
    )
    image, masks, full = render((square,), np.zeros((64, 64, 3), np.uint8))
    expected = np.zeros((64, 64), bool)
    expected[16:48, 16:48] = True  # half a side of 0.25: from 0.25 to 0.75 of 64 pixels
    assert abs(int(masks[0].sum()) - 1024) <= 64
    assert (masks[0] & expected).sum() == 1024
    assert full[0] == masks[0].sum()
    assert (image[20:44, 20:44] == (200, 10, 20)).all()
    assert (image[:14] == 0).all()


def test_a_thing_in_front_hides_what_is_behind_it():
    behind, front = thing("circle", "red", 0.5, 0.5, size="large"), thing("circle", "blue", 0.5, 0.5)
    _, masks, full = render((behind, front), np.zeros((128, 128, 3), np.uint8))
    assert not (masks[0] & masks[1]).any()
    assert masks[1].sum() == full[1]
    assert masks[0].sum() == full[0] - full[1]


def test_the_difficulty_is_as_promised(scenes):
    areas, shared, said = [], 0, 0
    for index, scene in enumerate(scenes):
        assert 2 <= len(scene.things) <= 6
        found = say.single_expressions(np.random.default_rng(index), scene.things)
        said += len(found)
        areas += [scene.masks[e.targets[0]].mean() for e in found]
        shared += any(
            other.colour == scene.things[e.targets[0]].colour
            or other.shape == scene.things[e.targets[0]].shape
            for e in found
            for i, other in enumerate(scene.things)
            if i != e.targets[0]
        )
    assert shared > 0.5 * len(scenes)
    assert np.median(areas) <= 0.10
    assert said >= 2.5 * len(scenes)
    assert len({t.shape for s in scenes for t in s.things}) == len(SHAPES) >= 4
    assert len({t.colour for s in scenes for t in s.things}) == len(COLOURS) >= 6


def test_small_and_large_things_are_clearly_apart(scenes):
    areas = {"small": [], "large": []}
    for scene in scenes:
        _, masks, full = render(scene.things, background(np.random.default_rng(0), 128))
        assert (masks.sum((1, 2)) >= 0.7 * full).all()
        for t, pixels in zip(scene.things, full, strict=True):
            areas[t.size].append(pixels / 128**2)
    assert max(areas["small"]) < 0.05
    assert min(areas["large"]) > 0.065


THINGS = (
    thing("circle", "red", 0.2, 0.2),
    thing("circle", "red", 0.8, 0.25, size="large", texture="striped"),
    thing("square", "blue", 0.5, 0.8),
    thing("star", "red", 0.15, 0.75),
)


@pytest.mark.parametrize(
    ("query", "text", "meant"),
    [
        (Query(shape="circle"), "the circle", (0, 1)),
        (
            Query(size="large", colour="red", texture="striped", shape="circle"),
            "the large red striped circle",
            (1,),
        ),
        (Query(colour="red", place="on the left"), "the red object on the left", (0, 3)),
        (Query(shape="circle", place="at the top right"), "the circle at the top right", (1,)),
        (Query(shape="circle", extreme="leftmost"), "the leftmost circle", (0,)),
        # one square: nothing to compare
        (Query(shape="square", extreme="leftmost"), "the leftmost square", None),
        (Query(extreme="leftmost"), "the leftmost object", None),  # 0.15 and 0.2 are too near
        (
            Query(shape="circle", relation="right of", anchor=Query(colour="blue", shape="square")),
            "the circle right of the blue square",
            (1,),
        ),
        # 0.05 apart
        (
            Query(shape="star", relation="above", anchor=Query(shape="square")),
            "the star above the square",
            None,
        ),
        # which circle?
        (
            Query(shape="star", relation="below", anchor=Query(shape="circle")),
            "the star below the circle",
            None,
        ),
        (Query(shape="cross"), "the cross", ()),
    ],
)
def test_the_resolver_agrees_with_a_person(query, text, meant):
    assert say.phrase(query) == text
    assert resolve(query, THINGS) == meant


def test_captions_have_one_grammar():
    assert say.region_caption(THINGS[1]) == "a large red striped circle at the top right of the picture"
    text, spans = say.grounded_caption(THINGS)
    assert (
        text
        == "a small red star at the bottom left, a small red circle at the top left and a small blue square at the bottom"
    )
    assert [(text[start:end], i) for (start, end), i in spans] == [
        ("a small red star", 3),
        ("a small red circle", 0),
        ("a small blue square", 2),
    ]


def test_expressions_for_several_and_for_none_mean_what_they_say(scenes):
    several = none = 0
    for index, scene in enumerate(scenes):
        rng = np.random.default_rng(index)
        if (found := say.several_expression(rng, scene.things)) is not None:
            several += 1
            words = found.text.split()
            noun = words[-1].removesuffix("es") if words[-1] == "crosses" else words[-1].removesuffix("s")
            expected = [
                i
                for i, t in enumerate(scene.things)
                if noun in ("object", t.shape)
                and {w for w in words[:-1] if w not in {"all", "the", *say.NUMBERS.values()}}
                <= set(traits(t))
            ]
            assert list(found.targets) == expected
            assert len(expected) >= 2
        if (found := say.none_expression(rng, scene.things)) is not None:
            none += 1
            assert not any(
                set(found.text.split()) - {"the", "object"} <= set(traits(t)) for t in scene.things
            )
    assert several > 60
    assert none > 60


def traits(t: Thing) -> tuple[str, ...]:
    return t.size, t.colour, t.texture, t.shape


def test_the_vocabulary_is_closed(scenes):
    allowed = say.vocabulary()
    assert len(allowed) <= 150
    for index, scene in enumerate(scenes):
        rng = np.random.default_rng(index)
        texts = [e.text for e in say.single_expressions(rng, scene.things)]
        texts += [say.grounded_caption(scene.things)[0].replace(",", "")] + [
            say.region_caption(t) for t in scene.things
        ]
        assert {word for text in texts for word in text.split()} <= allowed


def test_clips_say_how_things_move():
    kinds = set()
    for index in range(25):
        clip = draw_clip(seed=0, split="train", index=index, image_size=64, frames=8)
        assert clip.frames.shape == (8, 64, 64, 3)
        areas = clip.masks.sum((2, 3))  # (N, F)
        for moving, area in zip(clip.things, areas, strict=True):
            step = moving.path[-1] - moving.path[0]
            assert area.max() > 0
            if moving.motion == "still":
                assert (moving.path == moving.path[0]).all()
            if moving.motion == "leaving":
                assert area[-1] == 0
            if moving.motion == "entering":
                assert area[0] == 0
            if moving.direction in ("left", "right"):
                assert abs(step[0]) > abs(step[1])
                assert (step[0] > 0) == (moving.direction == "right")
        for expression in clip_expressions(np.random.default_rng(index), clip.things):
            kinds.add(expression.kind)
            if expression.text.endswith("does not move"):
                assert clip.things[expression.targets[0]].motion == "still"
            if " moving " in expression.text:
                assert clip.things[expression.targets[0]].direction == expression.text.split()[-1]
    assert kinds == {"motion", "attribute", "several"}
