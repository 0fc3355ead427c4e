"""Figures by family, and what the controls change."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ans_core.agent import controls, tokens
from ans_core.agent.controls import RandomCalls
from ans_core.agent.episode import Observation
from ans_core.agent.evaluation import Outcome, metrics, request_of
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import Change, PlayedEpisode, Shown, play
from ans_core.agent.policy import add_call_tokens
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.workspace import Workspace
from ans_core.agent.world import draw_question
from ans_core.agent.world.question import Question
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.inference import clicks
from ans_core.model.network import Network
from tests import tiny


def outcome(
    question: Question, *, right: bool, used: bool, evidence: bool = False, calls: int = 0
) -> Outcome:
    return Outcome(
        question=question,
        answer="",
        right=right,
        used=used,
        evidence=evidence,
        calls=calls,
        valid_calls=int(used),
        token_count=3,
    )


def test_figures_by_family_and_their_mean_over_those_that_need_an_operation() -> None:
    asked = {
        family: draw_question(family, seed=0, split="val", index=0) for family in ("easy", "pattern", "text")
    }
    pattern, text = (
        replace(asked["pattern"], prior="x", answer="x"),
        replace(asked["text"], prior="x", answer="y"),
    )
    found = metrics(
        [
            outcome(asked["easy"], right=True, used=False),
            outcome(pattern, right=True, used=True, evidence=True, calls=2),
            outcome(pattern, right=True, used=True, evidence=False, calls=1),
            outcome(pattern, right=False, used=True, calls=1),
            outcome(pattern, right=False, used=False),
            outcome(text, right=True, used=False),
        ]
    )
    assert found["pattern/accuracy"] == 0.5
    assert found["pattern/RaPR"] == 0.75
    assert found["pattern/accuracy_tool"] == pytest.approx(2 / 3)
    assert found["pattern/accuracy_no_tool"] == 0.0
    assert found["pattern/evidence"] == 0.5
    assert found["pattern/valid_calls"] == 0.75
    assert (found["pattern/prior"], found["text/prior"]) == (1.0, 0.0)
    assert "text/valid_calls" not in found
    assert found["needed/accuracy"] == 0.75  # easy does not count
    assert found["needed/RaPR"] == 0.375
    assert found["needed/accuracy_tool"] == pytest.approx(2 / 3)  # text called nowhere
    assert found["easy/RaPR"] == 0.0


def test_at_random_places_locate_shows_the_mask_and_the_crop_of_a_random_point(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[Any] = []

    def at_point(model: Network, picture: Image.Image, where: Any) -> tuple[np.ndarray, float]:
        points.append(where)
        mask = np.zeros((picture.height, picture.width), bool)
        mask[20:40, 20:40] = True
        return mask, 0.9

    monkeypatch.setattr(clicks, "mask_by_points", at_point)
    start = Workspace.of([tiny.picture(0)])
    call = Call(name="locate", arguments={"text": "the red square"})
    with RandomCalls(own_model, seed=0) as toolbox:
        seen, after = toolbox.call(start, call)
        refused, _ = toolbox.call(start, Call(name="locate", arguments={}))
    assert (seen.ok, seen.call, seen.pictures) == (True, call, ("image_2",))
    assert re.fullmatch(r"mask_1: .*; image_2: \[.*\]", seen.text)
    assert [name for name, _ in after.handles] == ["image_1", "mask_1", "image_2"]
    assert len(points) == 1
    assert refused.error == "wrong_type"


@pytest.mark.slow
def test_controls_exchange_blank_and_move_what_calls_give(own_model: Network) -> None:
    add_call_tokens(own_model, OPERATIONS)
    questions = [draw_question("pattern", seed=0, split="val", index=i, tile=64) for i in range(2)]
    requests, plans = [request_of(q) for q in questions], [[call_text(q.plan[0])] for q in questions]
    with RandomCalls(own_model, seed=0) as elsewhere:
        moved = play(own_model, elsewhere, requests, limits=EpisodeSettings(turn_tokens=2), plans=plans)
        for question, episode in zip(questions, moved, strict=True):
            (x1, y1, x2, y2), call = (
                question.plan[0].arguments["bbox_2d"],
                episode.episode.observations[0].call,
            )
            assert call is not None
            box = call.arguments["bbox_2d"]
            assert (box[2] - box[0], box[3] - box[1]) == (x2 - x1, y2 - y1)
            assert box != [x1, y1, x2, y2]
    with RandomCalls(own_model, seed=0) as toolbox:
        for given, kept in (
            ({"text": "it", "image": "image_1"}, {"point_2d", "image"}),
            ({"mask": "mask_1"}, {"mask"}),
        ):
            call = toolbox.call(questions[0].workspace(), Call(name="segment_object_at", arguments=given))[
                0
            ].call
            assert call is not None
            assert call.arguments.keys() == kept
        # without the first episode
        again = play(own_model, toolbox, requests[1:], limits=EpisodeSettings(turn_tokens=2), plans=plans[1:])
        assert again[0].episode.observations[0].call == moved[1].episode.observations[0].call
        two_tokens = EpisodeSettings(turn_tokens=2)

        def changed(count: int, change: Change) -> list[PlayedEpisode]:
            return play(
                own_model, toolbox, requests[:count], limits=two_tokens, plans=plans[:count], change=change
            )

        swapped = changed(len(requests), controls.shuffled)
        grey = changed(len(requests), controls.blank)
        (alone,) = changed(1, controls.shuffled)
    assert [e.crops[1].frame for e in swapped] == [questions[1].frames[0], questions[0].frames[0]]
    assert np.ptp(np.asarray(alone.crops[1].picture(least=64))) == 0  # there is nobody to exchange with
    for episode in grey:
        shown = episode.turns[0].shown
        assert shown is not None
        assert shown.text == "<image>\nimage_2"
        assert np.ptp(np.asarray(episode.crops[1].picture(least=64))) == 0
    failed = Shown(
        text="Error: no",
        crops=(),
        observation=Observation(call=Call(name="zoom_in", arguments={}), text="no", error="bad_box"),
    )
    assert controls.blank([failed]) == controls.shuffled([failed]) == [failed]
    openers = tokens.call_openers(own_model)
    (silent,) = play(
        own_model, toolbox, requests[:1], limits=EpisodeSettings(turn_tokens=8), forbidden=openers
    )
    assert len(openers) > 5
    assert not set(openers) & {number for turn in silent.turns for number in turn.ids}
    words = tokens.all_but(own_model, ["red", "dark blue"])
    (silent,) = play(own_model, toolbox, requests[:1], limits=EpisodeSettings(turn_tokens=8), forbidden=words)
    spelled = {number for text in ("red", "dark blue") for number in tokens.turn_ids(own_model, text)}
    assert {number for turn in silent.turns for number in turn.ids} <= spelled
