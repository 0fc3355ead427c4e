"""Rewards of an episode on numbers worked out by hand."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from ans_core.agent.episode import Observation
from ans_core.agent.protocol import Call
from ans_core.agent.refusal import ErrorKind
from ans_core.agent.rewards.coherence import coherence
from ans_core.agent.rewards.curiosity import ToolUse, bonus, price
from ans_core.agent.rewards.curriculum import Curriculum
from ans_core.agent.rewards.penalties import penalties
from ans_core.agent.rewards.running import RunningNorm
from ans_core.agent.rewards.total import shaping
from ans_core.config.rft import PhaseEnd, RewardPhases


def told(name: str, error: ErrorKind | None = None, **arguments: object) -> Observation:
    return Observation(call=Call(name=name, arguments=arguments), text="", error=error)


def test_a_right_answer_never_earns_less_than_a_wrong_one() -> None:
    rng = Random(0)
    weights = {"curiosity": 1.0, "coherence": 0.1, "penalty": 1.0}
    for _ in range(2000):
        one, other = (
            {name: rng.choice((-50.0, -1.0, 0.0, rng.gauss(0, 3), 50.0)) for name in weights}
            for _ in range(2)
        )
        assert 1 + shaping(one, weights) >= 0.6 > 0.4 >= shaping(other, weights)
    assert shaping({"curiosity": 0.1, "coherence": -1.0, "penalty": -0.2}, weights) == pytest.approx(-0.2)
    assert shaping(
        {"curiosity": 0.1, "coherence": -1.0, "penalty": -0.2}, {"curiosity": 1.0}
    ) == pytest.approx(0.1)


def test_curiosity_pays_for_calls_while_few_episodes_make_them() -> None:
    """Pixel-Reasoner's numbers for a group of 8: .0875 at one call, .025 at two, nothing beyond .3."""
    for called, expected in ((1, 0.0875), (2, 0.025), (3, 0.0)):
        use = ToolUse(with_call=float(called), without=8.0 - called)
        assert bonus(successful=2, shortest=1, use=use) == pytest.approx(expected)
        assert bonus(successful=0, shortest=1, use=use) == bonus(successful=2, shortest=0, use=use) == 0
    assert [price(calls=n, shortest=2) for n in (0, 2, 3, 4)] == pytest.approx([0, 0, -0.05, -0.1])
    assert price(calls=1, shortest=0) == pytest.approx(-0.05)


def test_a_familys_tool_use_decays_and_the_bonus_comes_back_where_calls_die() -> None:
    """10 episodes, 2 of them with a call; then .9 of these counts and 10 more, 6 with a call: (1.8 + 6) / (9
    + 10)."""
    use = ToolUse().after(ToolUse(with_call=2.0, without=8.0))
    assert use.rapr == 0.2
    assert use.after(ToolUse()) == use
    used = use.after(ToolUse(with_call=6.0, without=4.0))
    assert used.rapr == pytest.approx(7.8 / 19)
    assert bonus(successful=1, shortest=1, use=used) == 0
    rare = used
    for _ in range(30):
        rare = rare.after(ToolUse(without=10.0))
    assert rare.rapr < 0.05
    assert bonus(successful=1, shortest=1, use=rare) > 0.1


def test_coherence_is_the_mean_over_neighbouring_steps() -> None:
    segment, other = told("segment_object_at", text="a"), told("segment_object_at", text="b")
    measure, zoom, read = (
        told("get_properties", masks=["mask_1"]),
        told("zoom_in", mask="mask_1"),
        told("read_text", image="image_2"),
    )
    plan = [Call(name=name, arguments={}) for name in ("zoom_in", "read_text")]  # .2
    assert coherence([], plan=plan) == 0
    assert coherence([zoom], plan=plan) == 0
    assert coherence([zoom, read], plan=plan) == pytest.approx(0.2)
    assert coherence([segment, other, measure], plan=plan) == pytest.approx((0 + 0.2 + 0.2) / 3)
    assert coherence([segment, segment], plan=plan) == pytest.approx(-0.25)
    assert coherence([zoom, told("zoom_in", mask="mask_2")], plan=plan) == pytest.approx(-0.15)
    assert coherence([measure, segment], plan=plan) == pytest.approx(-0.15)
    assert coherence([segment, told("get_properties", "unknown_handle")], plan=plan) == 0
    assert coherence([Observation(call=None, text="", error="broken_call"), zoom], plan=plan) == 0


def test_good_pairs_that_a_question_does_not_need_earn_nothing() -> None:
    """One look answers: reading the crop, too, is a good pair, and would be paid for a needless call."""
    zoom, read = told("zoom_in", mask="mask_1"), told("read_text", image="image_2")
    look = [Call(name="zoom_in", arguments={})]
    assert coherence([zoom, read], plan=look) == coherence([zoom], plan=look) == 0
    assert coherence([zoom, read], plan=[]) == coherence([], plan=[]) == 0
    assert coherence([zoom, zoom], plan=look) < 0


def test_penalties_are_counted_by_name() -> None:
    missing = told("track_object", "not_a_clip", mask="mask_1")
    found = penalties(
        [missing, told("zoom_in", "bad_box"), told("segment_object_at"), told("get_properties")], answer=" "
    )
    assert {name: value for name, value in found.items() if value} == pytest.approx(
        {"prerequisite": -0.1, "still": -0.2, "out_of_bounds": -0.05, "no_answer": -0.1}
    )
    assert penalties([told("zoom_in")] * 5, answer="red")["over_use"] == pytest.approx(-0.2)
    assert not any(penalties([told("zoom_in")] * 3, answer="red").values())


def test_the_running_norm_forgets_whole_steps_and_does_not_scale_noise_up() -> None:
    norm = RunningNorm()
    assert norm(0.3) == 0.3
    norm = norm.after(4.0, 4.0, 8.0)  # 0, 0, 2, 2: mean 1, deviation 1
    assert norm(3.0) == pytest.approx(2.0)
    for _ in range(10):
        norm = norm.after(100.0, 50.0, 25.0)  # all .5
    assert len(norm.steps) == 10
    assert norm(0.6) == pytest.approx(0.1 / 0.05)


RULES = RewardPhases(
    base=PhaseEnd(threshold=0.7, slope=0.001, steps=100), coherence=PhaseEnd(threshold=0.2, slope=0.001, steps=30), every=2,
    allowed_loss=0.05
)  # fmt: skip


def grown(curriculum: Curriculum, *accuracies: float, coherence: float = 0.0) -> Curriculum:
    for accuracy in accuracies:
        assert curriculum.move(RULES) == "stay"
        curriculum = curriculum.after(accuracy, coherence, RULES)
    return curriculum


def test_a_phase_ends_at_its_threshold_at_a_plateau_or_after_its_steps() -> None:
    assert grown(Curriculum(), 0.6, 0.7).move(RULES) == "stay"
    assert grown(Curriculum(), 0.6, 0.7, 0.7, 0.7).move(RULES) == "advance"
    assert grown(Curriculum(), *[0.5] * 10).move(RULES) == "advance"
    assert grown(Curriculum(), *[0.01 * i for i in range(10)]).move(RULES) == "stay"
    second = grown(Curriculum(), 0.7, 0.7).moved("advance", "base-2")
    assert (second.phase, second.boundary, second.steps) == ("coherence", ("base-2", 0.7, 0.0), 0)
    assert grown(second, 0.7, 0.7, coherence=0.1).move(RULES) == "stay"
    assert grown(second, 0.7, 0.7, coherence=0.2).move(RULES) == "advance"
    third = grown(second, 0.7, 0.7, coherence=0.2).moved("advance", "coherence-4")
    assert third.phase == "full"
    rising = grown(Curriculum(phase="coherence"), *itertools.repeat(0.7, 4))
    for number in range(26):
        rising = rising.after(0.7, 0.002 * number, RULES)
    assert rising.move(RULES) == "advance"  # by its 30 steps: the coherence rises and is below the threshold
    assert grown(third, *[0.9] * 40).move(RULES) == "stay"


def test_a_phase_that_costs_accuracy_is_taken_back_and_tried_again_after_twice_the_time() -> None:
    second = grown(Curriculum(), 0.75, 0.75).moved("advance", "base-2")
    assert second.boundary == ("base-2", 0.75, 0.0)
    assert grown(second, 0.70, 0.70).move(RULES) == "stay"
    fallen = grown(second, 0.69, 0.70)
    assert fallen.move(RULES) == "roll_back"
    again = fallen.moved("roll_back")
    assert (again.phase, again.boundary, again.roll_backs) == ("base", None, 1)
    assert grown(again, 0.9, 0.9).move(RULES) == "stay"
    assert grown(again, 0.9, 0.9, 0.9, 0.9).move(RULES) == "advance"
    assert Curriculum(**fallen.state()) == fallen


def test_a_phase_is_not_taken_back_for_what_chance_may_cost() -> None:
    second = grown(Curriculum(), 0.75, 0.75).moved("advance", "base-2")
    assert grown(second, 0.5, 0.8).move(RULES) == "stay"  # .65 with a standard error of .15
    assert grown(second, 0.45, 0.5).move(RULES) == "roll_back"
    noisy = grown(Curriculum(), 0.6, 0.9).moved("advance", "base-2")
    assert noisy.boundary == ("base-2", 0.75, pytest.approx(0.15))
    assert grown(noisy, 0.6, 0.6).move(RULES) == "stay"
