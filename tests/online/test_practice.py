"""How episodes become rewards online, what keeps updates small, and what stops a release; by hand."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ans_core.agent import tokens
from ans_core.agent.crops import Crop, CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.policy import AgentPolicy, add_call_tokens
from ans_core.agent.protocol import Call, call_text
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.model.network import Network
from ans_core.online.admission import Gate
from ans_core.online.alerts import alerts
from ans_core.online.canary import refused
from ans_core.online.embedding import Encoder
from ans_core.online.learning import KlControl
from ans_core.online.neighbours import Neighbours
from ans_core.online.practice import Lesson, OnlinePractice, Progress
from ans_core.online.server import Question, query_of
from ans_core.online.simulation import poisoning, wrong_on
from ans_core.online.store import Store
from ans_core.pictures import rle
from ans_core.types import Request
from tests import tiny
from tests.online.test_admission import decision, task
from tests.online.test_store import VECTOR, experience, opened, outcome

QUESTION = "Which pattern is on the red square?"
REQUEST = Request(frames=(tiny.picture(0),), text=tokens.first_question(QUESTION))


def practised(
    store: Store, model: Network, toolbox: Toolbox, confirmed: str | None, **gate: object
) -> OnlinePractice:
    return OnlinePractice(
        store=store, toolbox=toolbox, neighbours=Neighbours(), features=CropFeatures(model), limits=EpisodeSettings(turn_tokens=4),
        gate=Gate(**gate), strategy="weighted", weigh_labels=True, confirm=lambda lesson, looked: confirmed,
    )  # fmt: skip


def said(model: Network, toolbox: Toolbox, *answers: str) -> list[PlayedEpisode]:
    return play(
        model,
        toolbox,
        [REQUEST] * len(answers),
        limits=EpisodeSettings(turn_tokens=4),
        plans=[[answer] for answer in answers],
    )


def lesson(**changes: object) -> Lesson:
    return Lesson(
        name="experience 1",
        request=REQUEST,
        form="pattern",
        task=task(question=QUESTION, **changes),
        truth="vertical",
    )


def test_each_rollout_is_scored_against_a_label_that_another_path_confirmed(
    tmp_path: Path, tiny_model: Network, toolbox: Toolbox
) -> None:
    """Two of three say checked, one what the verifier says: 6 of 8 votes."""
    group = said(tiny_model, toolbox, "checked", "Vertical.", "checked")
    with opened(tmp_path) as store:
        own = practised(store, tiny_model, toolbox, "vertical")
        scored = own._scored(lesson(), group)
        assert [rollout.rewards["task"] for rollout in scored] == [0.0, 1.0, 0.0]
        differ = (2 * math.log(3 / 2) + math.log(3)) / 3 / math.log(3)
        assert [rollout.measured["answer_entropy"] for rollout in scored] == pytest.approx([differ] * 3)
        (told,) = own.outcomes
        assert (told.label, told.share, told.verified, told.verdict) == ("vertical", 0.75, True, "admitted")
        assert [vote["verified"] for vote in told.provenance] == [False, True, False]
        wrong = practised(store, tiny_model, toolbox, "diagonal")
        assert all(math.isnan(rollout.rewards["task"]) for rollout in wrong._scored(lesson(), group))
        assert wrong.outcomes[0].verdict == "below_gate"  # 2 of 3
        alone = practised(store, tiny_model, toolbox, None, share=0.6)
        assert all(math.isnan(rollout.rewards["task"]) for rollout in alone._scored(lesson(), group))
        assert alone.outcomes[0].verdict == "not_verified"
        replay = Lesson(name="replay 0", request=REQUEST, form="pattern", truth="checked")
        assert [rollout.rewards["task"] for rollout in alone._scored(replay, group)] == [1.0, 0.0, 1.0]
        assert len(alone.outcomes) == 1


def test_the_answer_of_a_person_is_the_label_whatever_the_votes_are(
    tmp_path: Path, tiny_model: Network, toolbox: Toolbox
) -> None:
    group = said(tiny_model, toolbox, "checked", "Vertical.", "checked")
    with opened(tmp_path) as store:
        own = practised(store, tiny_model, toolbox, None, share=1.0)
        scored = own._scored(lesson(true_answer="vertical"), group)
        assert [rollout.rewards["task"] for rollout in scored] == [0.0, 1.0, 0.0]
        (label,) = own.outcomes
        assert (label.label, label.share, label.verified, label.verdict) == (
            "vertical",
            1.0,
            True,
            "admitted",
        )
        assert [vote["source"] for vote in label.provenance][-1] == "person"


def test_votes_for_an_answer_that_a_person_called_wrong_do_not_count(
    tmp_path: Path, tiny_model: Network, toolbox: Toolbox
) -> None:
    group = said(tiny_model, toolbox, "checked", "Vertical.", "checked")
    with opened(tmp_path) as store:
        own = practised(store, tiny_model, toolbox, "vertical", share=1.0)
        scored = own._scored(lesson(wrong_answer="Checked"), group)
        assert [rollout.rewards["task"] for rollout in scored] == [0.0, 1.0, 0.0]
        none = practised(store, tiny_model, toolbox, None, share=0.1)
        scored = none._scored(lesson(wrong_answer="checked"), said(tiny_model, toolbox, "checked"))
        assert none.outcomes[0].verdict == "no_answer"
        assert all(math.isnan(rollout.rewards["task"]) for rollout in scored)


@pytest.mark.slow
@pytest.mark.parametrize("loose", [0, 3])
def test_where_a_person_shows_the_thing_those_alone_vote_that_looked_at_it(
    tmp_path: Path, tiny_model: Network, toolbox: Toolbox, loose: int
) -> None:
    """The square of the picture is at 8 to 24 of 64 pixels, and what the person marks so much larger. No verifier
    knows the question."""
    square = np.zeros((tiny.SIDE, tiny.SIDE), bool)
    square[8 - loose : 24 + loose, 8 - loose : 24 + loose] = True
    at_it, elsewhere = (
        call_text(Call(name="zoom_in", arguments={"bbox_2d": box}))
        for box in ([125, 125, 375, 375], [500, 500, 900, 900])
    )
    plans = [["checked"], [at_it, "vertical"], [elsewhere, "checked"], [at_it, "vertical"]]
    with opened(tmp_path) as store:
        group = play(tiny_model, toolbox, [REQUEST] * 4, limits=EpisodeSettings(turn_tokens=64), plans=plans)
        own = practised(store, tiny_model, toolbox, None, share=0.8)
        scored = own._scored(lesson(mask=rle.encode(square)), group)
        (found,) = own.outcomes
        assert (found.label, found.verified, found.verdict) == ("vertical", True, "admitted")
        assert found.share == pytest.approx(12 / 14)
        assert [rollout.rewards["task"] for rollout in scored] == [0.0, 1.0, 0.0, 1.0]
        assert [vote["by"] for vote in found.provenance] == ["", "person's mask"] * 2
        unseen = practised(store, tiny_model, toolbox, None, share=0.1)
        unseen._scored(lesson(mask=rle.encode(square)), group[:1])
        assert unseen.outcomes[0].verdict == "no_answer"


def test_votes_come_from_the_same_question_alone(
    tmp_path: Path, tiny_model: Network, toolbox: Toolbox
) -> None:
    """Of three with the same vector, one has other words; the one that is asked does not vote for itself."""
    with opened(tmp_path) as store:
        for number, words in enumerate((QUESTION, QUESTION, "Which pattern is on the blue star?")):
            store.add(experience(number, question=words), np.ones(4, np.float32) / 2)
        store.finish(1, [outcome(n, "checked", share=0.8) for n in (1, 2, 3)])
        own = practised(store, tiny_model, toolbox, "checked")
        own.neighbours.follow(store)
        (rollout, _) = own._scored(lesson(), said(tiny_model, toolbox, "vertical", "vertical"))
        assert rollout.measured["answer_entropy"] == 0.0  # of the rollouts alone
        assert [vote["source"] for vote in own.outcomes[0].provenance] == [
            "rollout 0",
            "rollout 1",
            "experience 2",
        ]
        assert own.outcomes[0].label == "vertical"  # two voices against one, verified of another picture


def test_what_is_not_trusted_does_not_vote(tmp_path: Path, tiny_model: Network, toolbox: Toolbox) -> None:
    with opened(tmp_path) as store:
        for number in range(2):
            store.add(experience(number, question=QUESTION), np.ones(4, np.float32) / 2)
        for verdict, voices in {"below_gate": 2, "flipped": 2, "admitted": 3}.items():
            store.finish(1, [outcome(2, "checked", verdict=verdict)])
            own = practised(store, tiny_model, toolbox, "checked")
            own.neighbours.follow(store)
            own._scored(lesson(), said(tiny_model, toolbox, "vertical", "vertical"))
            assert len(own.outcomes[0].provenance) == voices, verdict
        assert len(store.votes([2])) == 1


def test_progress_survives_its_state() -> None:
    made = Progress(version=3, roll_backs=1, beta=0.02, at_once=4, suspects=[7])
    made.refusals.extend([True, False])
    made.marginal.add("pattern", "checked")
    made.recent.append(("admitted", True, False))
    state = json.loads(json.dumps(made.state()))
    assert Progress.of(state) == made


@pytest.mark.parametrize("verdict", [None, "below_gate"], ids=["new", "brought back by a person"])
def test_after_steps_that_are_not_finite_fewer_waiting_tasks_are_tried_down_to_one(
    tmp_path: Path, tiny_model: Network, toolbox: Toolbox, verdict: str | None
) -> None:
    with opened(tmp_path) as store:
        own = practised(store, tiny_model, toolbox, None)
        for number in range(5):
            store.add(experience(number), VECTOR)
        tasks = [replace(one, verdict=verdict) for one in store.tasks(range(1, 6))]
        revisited = replace(tasks.pop(), waits=False)
        lessons = [Lesson(name=str(one.experience), request=REQUEST, form="", task=one) for one in tasks]
        own.begin([*lessons, Lesson(name="again", request=REQUEST, form="", task=revisited)])
        own.take_back()
        assert (own.progress.at_once, own.progress.suspects) == (2, [])
        own.begin(lessons[:2])
        own.take_back()
        own.begin(lessons[:1])
        own.take_back()
        assert (own.progress.at_once, own.progress.suspects) == (0, [1])
        store.add_feedback(1, right=True)
        store.finish(1, own.finish())
        assert (store.waiting(9), store.tasks([1])[0].verdict) == ([2, 3, 4, 5], "not_finite")


def test_beta_steers_the_kl_to_its_target_and_stays_in_its_limits() -> None:
    control = KlControl()
    assert control.after(0.01, 0.061) == pytest.approx(0.012)
    assert control.after(0.012, 0.039) == pytest.approx(0.01)
    assert control.after(0.01, 0.05) == control.after(0.01, 0.06) == 0.01
    assert (control.after(1.0, 9.0), control.after(1e-4, 0.0)) == (1.0, 1e-4)
    assert (control.too_far(0.1), control.too_far(0.101)) == (False, True)


def test_a_release_may_lose_little_against_the_start() -> None:
    def right(lost: int, gained: int) -> list[bool]:
        """Of 200 questions the floor has 160."""
        return [True] * (160 - lost) + [False] * lost + [True] * gained + [False] * (40 - gained)

    floor = right(0, 0)
    assert refused(right(20, 0), floor, allowed=0.02) == "accuracy on the canary 0.700, 0.100 below 0.800"
    assert refused(right(20, 0), floor, allowed=0.1 + 1e-9) is None
    # chance alone turns as many of 34 wrong one in five times
    assert refused(right(20, 14), floor, allowed=0.02) is None
    assert refused(right(20, 8), floor, allowed=0.02) == "accuracy on the canary 0.740, 0.060 below 0.800"
    assert refused([False] * 5, [True] * 5, allowed=0.02) is None
    assert refused([False] * 6, [True] * 6, allowed=0.02) == "accuracy on the canary 0.000, 1.000 below 1.000"
    assert refused([], [], allowed=0.0) is None  # a trial without canary


def test_as_good_a_release_is_seldom_refused_and_one_that_lost_much_mostly() -> None:
    rng = np.random.default_rng(0)

    def share(loss: float, questions: int = 200) -> float:
        """Of 500 releases of which 30 % of the answers are drawn anew, and `loss` more are wrong."""
        found = []
        for _ in range(500):
            before = rng.random(questions) < 0.8
            now = np.where(rng.random(questions) < 0.3, rng.random(questions) < 0.8, before) & (
                rng.random(questions) >= loss
            )
            found.append(refused(now.tolist(), before.tolist(), allowed=0.0) is not None)
        return float(np.mean(found))

    assert 0 < share(0.0) < 0.04
    assert max(share(0.0, questions) for questions in (1, 3, 5, 50)) < 0.04
    assert share(0.15) > 0.9


def test_alerts_say_what_no_exception_tells() -> None:
    calm = {
        "online/recently_admitted": 0.5,
        "online/flip_rate": 0.0,
        "online/largest_label": 0.4,
        "online/pulled_back": 0.0,
    }
    assert alerts(calm, {"flooded": 2}, {"flooded": 2}) == {}
    loud = {
        "online/recently_admitted": 0.05,
        "online/flip_rate": 0.3,
        "online/largest_label": 0.9,
        "online/pulled_back": 1.0,
        "online/kl": 0.2,
    }
    told = alerts(loud, {"flooded": 5}, {"flooded": 2})
    assert list(told) == ["few_admitted", "flips", "one_label", "far_away", "flooded"]
    assert told["flooded"].startswith("3 experiences were not kept")


def test_vectors_of_one_picture_are_equal_and_no_training_moves_them() -> None:
    model = tiny.build()
    policy = AgentPolicy(
        model,
        lora={"rank": 2, "alpha": 4, "dropout": 0.0},
        rows=add_call_tokens(model, OPERATIONS)[:2],
        seed=0,
    )
    encoder = Encoder(policy, CropFeatures(model))
    same, other = Crop.full_frame(tiny.picture(0)), Crop.full_frame(tiny.picture(1, (40, 40, 60, 60)))
    first = encoder.vector(QUESTION, same)
    with torch.no_grad():
        for p in policy.adapters.parameters("agent").values():
            p.add_(1.0)
    assert np.array_equal(encoder.vector(QUESTION, same), first)
    assert float(first @ first) == pytest.approx(1.0, abs=1e-5)
    assert float(first @ encoder.vector(QUESTION, other)) < 0.98
    assert float(first @ encoder.vector("Where is it?", same)) < 0.98


def test_trials_change_their_share_of_verdicts_and_labels() -> None:
    confirm = wrong_on(lambda lesson, looked: "checked", 0.2, seed=0)
    told = [
        confirm(Lesson(name=f"experience {n}", request=REQUEST, form="pattern"), None) for n in range(300)
    ]
    assert told.count("checked") / 300 == pytest.approx(0.8, abs=0.05)
    assert set(told) == {"horizontal", "vertical", "diagonal", "checked"}
    relabel = poisoning(0.3, seed=0)
    labels = [relabel(task(experience=n), decision("checked", 0.5, False)) for n in range(300)]
    hit = [one for one in labels if one == decision("checked", 0.5, False).with_label("horizontal")]
    assert len(hit) / 300 == pytest.approx(0.3, abs=0.06)


PICTURE = base64.b64encode(tiny.picture(0)).decode()


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"image": PICTURE}, "question"),
        ({"question": "q"}, 'either "image" or "frames"'),
        ({"question": "q", "image": PICTURE, "frames": [PICTURE]}, 'either "image" or "frames"'),
        ({"question": "q", "image": "/etc/passwd"}, "no base64"),
        ({"question": "q", "frames": []}, "frames"),
        ({"question": "q", "image": PICTURE, "path": "x"}, "path"),
        ({"question": "q", "image": PICTURE, "request": ""}, "request"),
        ({"question": "q", "image": PICTURE, "request": "ann.lee@mail.example.org"}, "request"),
        ({"question": "q", "image": PICTURE, "request": "\ud800"}, "request"),
        ({"question": "q" * 5000, "image": PICTURE}, "5000 characters; at most 4000"),
        ({"question": "   ", "image": PICTURE}, "the question is empty"),
        ({"question": "\ud800 red?", "image": PICTURE}, "question"),
        ({"question": "q", "image": "éééééééé"}, "no base64"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(sent: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        query_of(Question.model_validate(sent))


def test_a_request_is_read() -> None:
    sent = {"question": "q", "frames": [PICTURE, PICTURE], "request": "mine"}
    found = query_of(Question.model_validate(sent))
    assert (found.request, found.clip, found.frames) == ("mine", True, (tiny.picture(0),) * 2)
    named = [query_of(Question(question="q", image=PICTURE)).request for _ in range(2)]
    assert named[0] != named[1]
