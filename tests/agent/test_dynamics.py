"""Learning progress: what it pays for, what the forward model sees of an episode, and that its state is
everything it depends on."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from ans_core.agent import practice as practices
from ans_core.agent.crops import Crop
from ans_core.agent.episode import Toolbox
from ans_core.agent.play import PlayedEpisode
from ans_core.agent.protocol import Call
from ans_core.agent.rewards import dynamics
from ans_core.agent.rewards.dynamics import (
    INPUTS,
    LAG,
    SIZE,
    Dynamics,
    ForwardModel,
    embedding,
    looks,
    no_sums,
    sums_of,
)
from ans_core.agent.world import Question
from ans_core.model.network import Network
from tests import tiny
from tests.agent import test_practice
from tests.agent.test_practice import HALF, MIDDLE, NAMES, practice, question, zoom

World = Callable[[], Tensor]


def units(rows: int, rng: torch.Generator) -> Tensor:
    found = torch.randn(rows, SIZE, generator=rng, dtype=torch.float64)
    return found / found.norm(dim=1, keepdim=True)


def earnings(world: World, steps: int) -> tuple[list[float], list[float]]:
    """Mean progress of each step's transitions, and their mean error."""
    model, made, errors = ForwardModel.new(), [], []
    for _ in range(steps):
        xy = world()
        older, newest = model.errors(xy)
        made.append(float((older - newest).mean()))
        errors.append(float(newest.mean()))
        model = model.after(sums_of(xy))
    return made, errors


def rows_of(before: Tensor, call: Tensor, after: Tensor) -> Tensor:
    return torch.stack([dynamics._row(*row) for row in zip(before, call, after, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("interaction", [False, True])
def test_what_can_be_learned_earns_while_it_is_learned_and_nothing_afterwards(interaction: bool) -> None:
    """Of random pictures and six calls; what is shown is the sum of a part of either, or depends on both
    together."""
    rng = torch.Generator().manual_seed(0)
    calls = units(6, rng)
    of_picture, of_call = (torch.randn(SIZE, SIZE, generator=rng, dtype=torch.float64) for _ in range(2))

    def world() -> Tensor:
        before, call = units(48, rng), calls[torch.randint(6, (48,), generator=rng)]
        after = (before * call) @ of_picture if interaction else before @ of_picture + call @ of_call
        return rows_of(before, call, after / after.norm(dim=1, keepdim=True))

    made, errors = earnings(world, 60)
    assert made[0] == 0.0  # nothing has been learned yet
    assert min(made[1:LAG]) > 0.1
    assert max(map(abs, made[50:])) < 0.01
    assert errors[-1] < 0.1


def test_noise_earns_nothing_on_average_although_it_is_never_predicted() -> None:
    """Each picture is another one, whatever was done: its error is 1 for ever, and would be paid for ever."""
    rng = torch.Generator().manual_seed(1)
    calls = units(6, rng)
    made, errors = earnings(
        lambda: rows_of(units(48, rng), calls[torch.randint(6, (48,), generator=rng)], units(48, rng)), 80
    )
    assert min(errors) > 0.95
    assert sum(made) / len(made) < 0.002
    assert max(made) < 0.05  # while what was taken for a rule is unlearned
    assert abs(sum(made[40:]) / 40) < 0.003


def test_steps_without_transitions_change_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    model = ForwardModel.new().after(sums_of(rows_of(units(5, rng), units(5, rng), units(5, rng))))
    assert model.after(no_sums()) is model
    for _ in range(LAG + 3):
        model = model.after(sums_of(rows_of(units(5, rng), units(5, rng), units(5, rng))))
    assert len(model.weights) == LAG + 1


def test_a_call_has_one_embedding_for_ever_and_boxes_side_by_side_are_alike() -> None:
    def box(*bbox: int, seed: int = 0, image: str = "image_1", name: str = "zoom_in") -> Tensor:
        return embedding(Call(name=name, arguments={"bbox_2d": list(bbox), "image": image}), seed=seed)

    first = box(100, 100, 400, 400)
    reordered = Call(name="zoom_in", arguments={"image": "image_1", "bbox_2d": [100, 100, 400, 400]})
    assert torch.equal(embedding(reordered, seed=0), first)
    dynamics._direction.cache_clear()
    assert torch.equal(box(100, 100, 400, 400), first)
    assert float(first.norm()) == pytest.approx(1.0)
    near, far = float(first @ box(120, 100, 420, 400)), float(first @ box(600, 500, 1000, 900))
    assert near > 0.99 > far
    for other in (
        box(100, 100, 400, 400, seed=1),
        box(100, 100, 400, 400, image="image_2"),
        box(100, 100, 400, 400, name="zoom"),
    ):
        assert float(first @ other) < 0.9
    frames = [embedding(Call(name="select_frames", arguments={"frames": [n]}), seed=0) for n in (1, 2)]
    assert not torch.equal(*frames)


CHAIN = [HALF, zoom(100, 100, 900, 900, image="image_2")]
PLANS = [[], [HALF], CHAIN, ["<tool_call>{}", MIDDLE], [zoom(500, 500, 100, 100)]]


def episodes(model: Network, own: practices.AgentPractice, asked: Question) -> list[PlayedEpisode]:
    request = own.ask(asked)
    return practices.play(
        model, own.toolbox, [request] * len(PLANS), limits=own.limits, plans=PLANS, features=own.features
    )  # fmt: skip


def test_a_transition_is_a_call_that_showed_something_and_no_picture_is_encoded_twice(
    toolbox: Toolbox,
) -> None:
    model = tiny.build()
    own = practice(model, toolbox, dynamics=0.5)
    assert own.dynamics is not None
    played = episodes(model, own, question(NAMES[0]))
    # a malformed call and a refused one show nothing
    assert [len(list(looks(one))) for one in played] == [0, 1, 2, 1, 0]
    before = own.features.encoded
    rows = [own.dynamics.transitions.of(one) for one in played]
    assert own.features.encoded == before
    assert [tuple(one.shape) for one in rows] == [(n, INPUTS + SIZE) for n in (0, 1, 2, 1, 0)]
    assert torch.equal(rows[1][0], rows[2][0])
    before_of, after_of = rows[2][:, 1 : 1 + SIZE], rows[2][:, INPUTS:]
    assert torch.equal(before_of[1], after_of[0])  # the second call is about what the first one showed
    (_, shown), _ = looks(played[2])
    assert shown == (Crop.of(played[2].episode.workspace, "image_2"),)


@pytest.mark.slow
def test_an_episode_earns_the_mean_of_its_transitions_by_models_that_have_not_seen_its_step(
    toolbox: Toolbox,
) -> None:
    model = tiny.build()
    own = practice(model, toolbox, dynamics=0.5)
    assert own.dynamics is not None
    played = episodes(model, own, question(NAMES[0]))
    first = [own.dynamics.earned(one)[1] for one in played]
    assert [told["dynamics"] for told in first] == [0.0] * len(PLANS)
    assert ["dynamics_error" in told for told in first] == [False, True, True, True, False]
    own.dynamics.end_rollouts(lambda values: values)
    second = [own.dynamics.earned(one)[1] for one in played]
    older, newest = own.dynamics.model.errors(own.dynamics.transitions.of(played[2]))
    assert second[2]["dynamics"] == pytest.approx(float((older - newest).mean()))
    assert second[0]["dynamics"] == second[4]["dynamics"] == 0.0
    assert all(second[i]["dynamics"] > 0.05 for i in (1, 2, 3))
    for _ in range(60):
        own.dynamics.end_rollouts(lambda values: values)
        last = [own.dynamics.earned(one)[1] for one in played]
    assert max(abs(told["dynamics"]) for told in last) < 0.01


def test_learning_progress_shapes_within_the_limit_and_without_a_weight_nothing_of_it_is_there(
    toolbox: Toolbox,
) -> None:
    model = tiny.build()
    asked = question(NAMES[1])
    off, on, much = (practice(model, toolbox, dynamics=weight) for weight in (0.0, 0.01, 100.0))
    played = episodes(model, off, asked)
    for own in (off, on, much):
        for one in played:
            own._rewarded(asked, one)
        own.end_rollouts(lambda values: values)
    assert off.dynamics is None
    assert "dynamics" not in off.state()
    none, some, most = (own._rewarded(asked, played[1]) for own in (off, on, much))
    assert not any("dynamics" in name for name in none.measured)
    assert none.measured == {name: value for name, value in some.measured.items() if "dynamics" not in name}
    assert on.dynamics is not None
    assert some.rewards["shaping"] - none.rewards["shaping"] == pytest.approx(
        0.01 * on.dynamics.norm(some.measured["dynamics"])
    )
    assert some.rewards["shaping"] > none.rewards["shaping"]
    assert (most.rewards["task"], most.rewards["shaping"]) == (none.rewards["task"], 0.4)


@pytest.mark.slow
def test_a_practice_that_was_loaded_goes_on_to_the_same_bits(toolbox: Toolbox) -> None:
    model = tiny.build()
    whole, killed = (practice(model, toolbox, dynamics=0.5) for _ in range(2))
    played = {name: episodes(model, whole, question(name)) for name in NAMES}

    def step(own: practices.AgentPractice) -> list[dict[str, float]]:
        found = [own._rewarded(question(name), one).rewards for name, some in played.items() for one in some]
        own.end_rollouts(lambda values: values)
        return found

    for _ in range(LAG + 2):
        step(whole)
        step(killed)
    file = io.BytesIO()
    torch.save(killed.state(), file)
    again = practice(model, toolbox, dynamics=0.5)
    again.load(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for _ in range(LAG + 2):
        assert step(again) == step(whole)
    torch.testing.assert_close(again.state()["dynamics"], whole.state()["dynamics"], rtol=0, atol=0)


def together(processes: Sequence[Dynamics]) -> None:
    """End the step on processes that sum what they have."""
    barrier, told = threading.Barrier(len(processes)), {}

    def total(rank: int, values: Tensor) -> Tensor:
        told[rank] = values
        barrier.wait()
        summed = torch.stack([told[other] for other in range(len(processes))]).sum(0)
        barrier.wait()
        return summed

    threads = [
        threading.Thread(target=own.end_rollouts, args=(partial(total, rank),))
        for rank, own in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_processes_end_with_one_model_that_is_a_single_ones(toolbox: Toolbox) -> None:
    """The second one has an episode without transitions in the first step, and none in the second."""
    model = tiny.build()
    own = practice(model, toolbox, dynamics=0.5)
    played = episodes(model, own, question(NAMES[0]))
    alone, first, second = (Dynamics(own.features, seed=0) for _ in range(3))
    for shares in ((played[1:4], played[:1]), (played, [])):
        for one in (*shares[0], *shares[1]):
            alone.earned(one)
        for process, some in zip((first, second), shares, strict=True):
            for one in some:
                process.earned(one)
        alone.end_rollouts(lambda values: values)
        together([first, second])
    torch.testing.assert_close(first.state(), second.state(), rtol=0, atol=0)
    torch.testing.assert_close(first.state(), alone.state(), rtol=1e-9, atol=1e-12)
    assert float(alone.model.weights[-1].abs().sum()) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
def test_episodes_are_learned_with_learning_progress_among_their_metrics(toolbox: Toolbox) -> None:
    found, _ = test_practice.updated(test_practice.loops(toolbox, dynamics=0.5), range(2))
    assert found[0]["agent/dynamics"] == 0.0
    assert found[1]["agent/dynamics"] > 0.01
    assert 0 < found[1]["agent/dynamics_error"] < found[0]["agent/dynamics_error"]


planned = test_practice.planned
