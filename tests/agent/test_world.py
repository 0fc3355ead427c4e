"""The drawn world: what its questions promise, and that their plans work on the operations."""

from __future__ import annotations

import functools
import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from ans_core.agent.episode import Episode, Toolbox
from ans_core.agent.evaluation import outcome_of_episode
from ans_core.agent.operations.base import SMALLEST, pixel_box
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.workspace import FIRST, TrackHandle, Workspace
from ans_core.agent.world import FAMILIES, TILE, Question, draw_question, evidence, oracle
from ans_core.agent.world.drawing import DARKENED, PATTERNS, SHRINKS, paint_pattern, segment, zoom
from ans_core.agent.world.question import PART, faithful_calls
from ans_core.data.conversation import BOX_STEP
from ans_core.data.scenes import SPLITS
from ans_core.model.network import Network
from ans_core.pictures import rle


def pixels(question: Question, frame: int = 0) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(question.frames[frame])))


def questions(family: str, count: int, split: str = "val", seed: int = 0) -> list[Question]:
    return [drawn_once(family, seed, split, index) for index in range(count)]


@functools.cache
def drawn_once(family: str, seed: int, split: str, index: int) -> Question:
    """A clip takes 0.1 s, and several tests ask for the same hundred."""
    return draw_question(family, seed=seed, split=split, index=index)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_question_depends_on_seed_split_and_index_alone_and_no_scene_comes_twice(family: str) -> None:
    drawn = [
        draw_question(family, seed=seed, split=split, index=i)
        for seed in (0, 1)
        for split in SPLITS
        for i in range(3)
    ]
    assert draw_question(family, seed=1, split="val", index=2) == drawn[3 * 4 + 2]
    assert len({question.frames[0] for question in drawn}) == len(drawn)
    assert len({question.question_id for question in drawn[:9]}) == 9
    assert pixels(drawn[0]).shape == (SHRINKS * TILE, SHRINKS * TILE, 3)
    assert pixels(draw_question(family, seed=0, split="test", index=0, tile=64)).shape == (256, 256, 3)


def test_unknown_families_and_splits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no family named 'patern'; .* 'pattern'"):
        draw_question("patern", seed=0, split="val", index=0)
    with pytest.raises(ValueError, match="no split 'dev'"):
        draw_question("easy", seed=0, split="dev", index=0)


def test_a_pattern_leaves_nothing_at_the_tile_and_has_one_mean() -> None:
    """But for rounding, and for the picture's edge, where the filter ends."""
    means = []
    for pattern in PATTERNS:
        image = np.full((SHRINKS * TILE, SHRINKS * TILE, 3), 200, np.uint8)
        paint_pattern(image, np.ones(image.shape[:2], bool), pattern)
        assert set(np.unique(image)) == {200, round(200 * DARKENED)}
        means.append(image.mean())
        small = np.asarray(Image.fromarray(image).resize((TILE, TILE), Image.Resampling.BICUBIC))[
            2:-2, 2:-2
        ].astype(int)
        assert small.max() - small.min() <= 1
    assert means == [pytest.approx(100 * (1 + DARKENED))] * len(PATTERNS)


def test_a_look_at_a_pattern_is_shown_as_it_is() -> None:
    """A crop that is shrunk to half its size shows no pattern: of a large thing the look is at a part."""
    sides, wholes = [], []
    for question in questions("pattern", 20):
        box = question.plan[0].arguments["bbox_2d"]
        left, top, right, bottom = pixel_box(question.workspace(), FIRST, box, smallest=SMALLEST).box
        assert max(right - left, bottom - top) <= TILE + 1  # boxes are rounded outwards
        mask = rle.decode(question.targets[0].masks[0])
        assert mask[top:bottom, left:right].mean() > PART + 0.05
        sides.append(max(np.ptp(np.nonzero(mask), axis=1)))
        wholes.append(mask[top:bottom, left:right].sum() == mask.sum())
    assert max(sides) > 1.5 * TILE > TILE > min(sides)
    assert not all(wholes)


@pytest.mark.slow
def test_priors_are_those_that_are_set() -> None:
    """pattern: .2 + .8 / 4 = .4; text: .4 + .6 / 90. 150 questions: two standard deviations are .08."""
    for family, share in (("pattern", 0.4), ("text", 0.407)):
        drawn = questions(family, 150)
        assert np.mean([question.answer == question.prior for question in drawn]) == pytest.approx(
            share, abs=0.1
        )
    answers = Counter(question.answer for question in questions("moves", 60))
    assert set(answers) == {"left", "right", "up", "down"}
    assert max(answers.values()) < 28
    first = [question.answer == question.choices[0] for question in questions("larger", 60)]
    assert 0.3 < np.mean(first) < 0.7


def test_the_larger_thing_is_1_2_to_1_8_times_as_large() -> None:
    for question in questions("larger", 12):
        areas = {target.phrase: rle.area(target.masks[0]) for target in question.targets}
        ratio = areas[question.answer] / min(areas.values())
        assert 1.17 < ratio < 1.85  # of pixels
        assert set(areas) == set(question.choices)


@pytest.mark.slow
def test_the_first_frame_of_a_clip_does_not_tell_where_things_go() -> None:
    """The way may lead out of the picture: the mean place is the same for all directions."""
    places: dict[str, list[np.ndarray]] = {}
    for question in questions("moves", 100):
        mask = rle.decode(question.targets[0].masks[0])
        places.setdefault(question.answer, []).append(np.argwhere(mask).mean(0) / len(mask))
        assert len(question.frames) == 8
    for direction, axis in (("left", 1), ("right", 1), ("up", 0), ("down", 0)):
        assert np.mean([place[axis] for place in places[direction]]) == pytest.approx(0.5, abs=0.12)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "least"), [("easy", 1.0), ("pattern", 1.0), ("text", 0.9)])
def test_the_shortest_plan_answers_without_a_model(toolbox: Toolbox, family: str, least: float) -> None:
    runs = [outcome_of_episode(question, oracle(question, toolbox)) for question in questions(family, 10)]
    assert np.mean([run.right for run in runs]) >= least
    assert all(run.evidence for run in runs)
    assert {run.calls for run in runs} == {{"easy": 0, "pattern": 1, "text": 2}[family]}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["larger", "moves"])
def test_the_shortest_plan_answers_with_masks_that_are_right(
    tiny_model: Network, colour_sam: None, family: str
) -> None:
    with Toolbox(tiny_model) as toolbox:
        runs = [outcome_of_episode(question, oracle(question, toolbox)) for question in questions(family, 6)]
    assert all(run.right and run.evidence for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["larger", "moves"])
def test_plans_point_well_inside_of_things_with_numbers_that_models_write(family: str) -> None:
    for question in questions(family, 20, "train"):
        segments = [call for call in question.plan if call.name == "segment_object_at"]
        for call, target in zip(segments, question.targets, strict=True):
            mask = rle.decode(target.masks[0])
            x, y = call.arguments["point_2d"]
            assert (x % BOX_STEP, y % BOX_STEP) == (0, 0)
            row, column = y * len(mask) // 1000, x * len(mask) // 1000
            assert mask[row - 2 : row + 3, column - 2 : column + 3].all()


def test_evidence_is_a_closer_look_at_the_thing_asked_about(toolbox: Toolbox) -> None:
    question = questions("pattern", 1)[0]

    def looked(call: Call) -> bool:
        observation, workspace = toolbox.call(question.workspace(), call)
        assert observation.ok
        return evidence(question, workspace, [observation])

    assert looked(question.plan[0])
    assert not looked(question.distraction[0])
    assert not evidence(question, question.workspace(), [])
    assert not looked(Call(name="zoom_in", arguments={"bbox_2d": [0, 0, 1000, 1000]}))
    assert looked(zoom(question.targets[0].masks[0]))
    x, y, *_ = question.plan[0].arguments["bbox_2d"]
    assert not looked(Call(name="zoom_in", arguments={"bbox_2d": [max(0, x - 300), y, x - 100, y + 200]}))
    mask = rle.decode(question.targets[0].masks[0])
    for shown, right in ((mask, True), (~mask, False)):
        marked = Workspace.of(question.frames, masks=[shown])
        measured, after = toolbox.call(
            marked, Call(name="get_properties", arguments={"masks": ["mask_1"], "properties": ["texture"]})
        )
        assert measured.ok
        assert not evidence(question, marked, [])  # a mask shows no pattern
        assert evidence(question, after, [measured]) is right


def test_what_is_compared_is_found_and_what_moves_is_followed() -> None:
    compared, moved = questions("larger", 1)[0], questions("moves", 1)[0]
    first, second = (rle.decode(target.masks[0]) for target in compared.targets)
    assert evidence(compared, Workspace.of(compared.frames, masks=[first, second]), [])
    assert not evidence(compared, Workspace.of(compared.frames, masks=[first]), [])
    found = Workspace.of(moved.frames, masks=[rle.decode(moved.targets[0].masks[0])])
    assert not evidence(moved, found, [])
    track = TrackHandle(mask="mask_1", counts=tuple(mask["counts"] for mask in moved.targets[0].masks))
    assert evidence(moved, found.add([track]), [])


def test_calls_about_another_thing_are_not_faithful(toolbox: Toolbox) -> None:
    """One zoom on another thing, one on the thing asked about, one that fails."""
    question = draw_question("pattern", seed=0, split="val", index=0)
    episode = Episode(toolbox, question.workspace())
    for call in (*question.distraction, *question.plan, Call(name="zoom_in", arguments={"mask": "mask_9"})):
        episode.turn(call_text(call))
    assert [seen.ok for seen in episode.observations] == [True, True, False]
    assert faithful_calls(question, episode.workspace, episode.observations) == 1
    assert faithful_calls(question, episode.workspace, episode.observations[:1]) == 0


def test_a_point_is_as_far_inside_a_thing_as_numbers_of_its_step_get() -> None:
    rng = np.random.default_rng(0)
    for step in (BOX_STEP, 10):
        for _ in range(20):
            mask = ndimage.zoom(rng.random((6, 8)), 25, order=1) > 0.6  # also cut by the edge
            depth = ndimage.distance_transform_edt(mask)
            x, y = segment(rle.encode(mask), steps=(step,)).arguments["point_2d"]
            numbers = range(step, 1000, step)
            rows, columns = ([number * side // 1000 for number in numbers] for side in mask.shape)
            deepest = depth[np.ix_(rows, columns)].max()
            assert depth[y * mask.shape[0] // 1000, x * mask.shape[1] // 1000] == deepest > 0
    thin = np.zeros((400, 400), bool)
    thin[:, 3:9] = True
    assert segment(rle.encode(thin), steps=(BOX_STEP, 10)).arguments["point_2d"][0] in (10, 20)
