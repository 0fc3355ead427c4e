"""The agent's loop of RL: episodes with pictures in them are learned as they were sampled, also after the run
was killed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from ans_core import precision
from ans_core.agent import play as playing
from ans_core.agent import practice as practices
from ans_core.agent import tokens
from ans_core.agent.episode import Toolbox
from ans_core.agent.play import PlayedEpisode
from ans_core.agent.practice import AgentPractice, sample_of
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.rewards.curiosity import ToolUse
from ans_core.agent.world import Question, draw_question
from ans_core.config import Optim, Rl
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.config.rft import PhaseEnd, RewardPhases, Rft
from ans_core.model import adapters
from ans_core.model.network import Network
from ans_core.rl.batch import rl_batch
from ans_core.rl.dual_loop import Batches, DualLoop
from ans_core.rl.experience import Experience
from ans_core.rl.rollout import Group
from ans_core.types import Request
from tests import tiny

GROUP = 6
SETTINGS = Rl().model_copy(
    update={
        "loops": {"agent": 1.0},
        "group": GROUP,
        "max_tokens": 24,
        "samples_every": 0,
        "kl": 0.1,
    }
)
RULES = RewardPhases(
    base=PhaseEnd(threshold=2.0, slope=-9.0, steps=9),
    coherence=PhaseEnd(threshold=2.0, slope=-9.0, steps=9),
    every=1,
    allowed_loss=0.0,
)


def zoom(*box: int, image: str = "image_1") -> str:
    return call_text(Call(name="zoom_in", arguments={"bbox_2d": list(box), "image": image}))


HALF, MIDDLE = zoom(0, 0, 500, 500), zoom(250, 250, 750, 750)
PLANS = [
    [],
    [HALF],
    [HALF, zoom(100, 100, 900, 900, image="image_2")],
    ["<tool_call>{}", MIDDLE],
    [HALF, MIDDLE, HALF, MIDDLE, HALF, HALF],
    [],
]
"""What is said in the first turns of a group's episodes. The fifth runs into the limit of calls; a model then
says the rest."""


def question(name: str) -> Question:
    family, split, index = name.split("/")
    return draw_question(family, seed=0, split=split, index=int(index), tile=32)


NAMES = ("pattern/train/0", "easy/train/0")


def practice(
    model: Network, toolbox: Toolbox, rules: RewardPhases = RULES, at_a_time: int = 48
) -> AgentPractice:
    def ask(asked: Question) -> Request:
        return Request(frames=asked.frames, text=tokens.first_question(asked.text))

    settings = Rft(phases=rules, curious_share=1.0, optim=Optim(steps=10, batch=8, lr=1e-3))
    limits = EpisodeSettings(calls=4, pictures=16, turn_tokens=4)
    families = ("easy", "pattern")
    return AgentPractice(
        model, toolbox, question=question, ask=ask, families=families, limits=limits.model_copy(update={"batch": at_a_time}),
        settings=settings,
    )  # fmt: skip


def batch(model: Network, step: int = 0, names: tuple[str, ...] = NAMES, inner_steps: int = 1) -> Batches:
    asked = [question(name) for name in names]
    return Batches(
        batches=[rl_batch([sample_of(q) for q in asked], [q.text for q in asked], model, mask_size=1)],
        of={"agent": 0}, learned=len(names), rollout=step // inner_steps, micro=0, inner=step % inner_steps,
        step=step,
    )  # fmt: skip


def loops(toolbox: Toolbox, **changes: object) -> DualLoop:
    model = tiny.build()
    config = adapters.rl_config(
        rank=4, alpha=8, dropout=0.0, modules=adapters.policy_modules(model, drawing=False)
    )
    policies = adapters.Policies(model, config, seed=0)
    settings = SETTINGS.model_copy(update=changes)
    own = practice(model, toolbox)
    return DualLoop(policies, settings, seed=0, points=0, loss_weights=(0.0, 0.0), rewards={}, practice=own)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turns of every group's episodes are given: a model of random weights says no call."""
    play: Callable[..., object] = practices.play
    monkeypatch.setattr(
        practices, "play", lambda *a, **k: partial(play, plans=PLANS * (len(a[2]) // GROUP))(*a, **k)
    )


def updated(
    module: DualLoop, steps: range, *, inner_steps: int = 1
) -> tuple[list[dict[str, float]], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW([p for p in module.model.parameters() if p.requires_grad], lr=1e-2)
    return [update(module, optimizer, step, inner_steps) for step in steps], optimizer


def update(
    module: DualLoop, optimizer: torch.optim.Optimizer, step: int, inner_steps: int
) -> dict[str, float]:
    (moved,) = module.begin_step([batch(module.model, step, inner_steps=inner_steps)])
    loss, found = module(moved)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return found | module.after_step(step) | {"loss": float(loss.detach())}


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
def test_episodes_are_learned_as_they_were_sampled(toolbox: Toolbox) -> None:
    """Turns and pictures in unlike numbers, a refused call, an episode that ran into a limit: it has
    advantage 0 and is in no baseline."""
    module = loops(toolbox)
    (moved,) = module.begin_step([batch(module.model)])
    done = module.waiting[0]["agent"]
    assert [len(parts) for parts in done.observed] == [1 + 2 + 1 + 4] * 2
    assert done.observed[0][0] == (0, (0, 0, 64, 64))
    # the second box is of the first crop
    assert done.observed[0][1:3] == [(0, (0, 0, 64, 64)), (0, (6, 6, 58, 58))]
    assert done.advantage is not None
    assert torch.equal(done.rewards["task"].isnan(), torch.tensor([[False] * 4 + [True, False]] * 2))
    assert done.advantage[:, 4].tolist() == [0.0, 0.0]
    assert done.advantage.abs().sum() > 0
    loss, found = module(moved)
    loss.backward()
    assert found["agent/sampling_gap"] < 1e-4
    assert found["agent/ratio"] == 1.0
    assert found["agent/over_turn"] == 1.0  # five answers are cut off: wrong, and lessons
    assert found["agent/failed"] == pytest.approx(1 / 6)
    assert found["agent/RaPR"] == pytest.approx(4 / 6)
    learned = {n for n, p in module.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("lora_B.policy" in n for n in learned)
    assert all(".policy." in n for n in learned)


@pytest.mark.slow
def test_so_many_episodes_are_played_at_a_time_as_the_settings_say(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of six in fives: the same episodes, for seeds belong to them. The KV cache of a batch is
    what the memory must hold."""
    sizes: list[int] = []
    prompt = playing.prompt
    monkeypatch.setattr(playing, "prompt", lambda *given: sizes.append(len(given[1])) or prompt(*given))
    found = []
    for at_a_time in (48, 5):
        module = loops(toolbox)
        module.practice = practice(module.model, toolbox, at_a_time=at_a_time)
        module.begin_step([batch(module.model)])
        found.append(module.waiting[0]["agent"].texts)
    assert sizes == [12, 5, 5, 2]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_small_pictures_are_learned_as_they_were_shown_in_the_precision_they_were_sampled_in(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gap: float
) -> None:
    """40 x 20 pixels: shown to the agent they are enlarged to the model's tile. In a loop of bf16 over
    weights in fp32 all is bf16."""
    small = io.BytesIO()
    Image.open(io.BytesIO(question(NAMES[0]).frames[0])).resize((40, 20)).save(small, "PNG")
    asked = {name: replace(question(name), frames=(small.getvalue(),)) for name in NAMES}
    monkeypatch.setitem(globals(), "question", asked.__getitem__)
    module = loops(toolbox)
    with precision.autocast(module.model.device, dtype):
        (moved,) = module.begin_step([batch(module.model)])
        _, found = module(moved)
    assert found["agent/sampling_gap"] < gap


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
def test_an_agents_run_goes_on_to_the_same_bits(toolbox: Toolbox) -> None:
    """Killed between two updates on the same episodes: pictures are encoded anew from the file and the
    box."""
    whole = loops(toolbox, inner_steps=2)
    expected, _ = updated(whole, range(4), inner_steps=2)
    first = loops(toolbox, inner_steps=2)
    _, optimizer = updated(first, range(3), inner_steps=2)
    file = io.BytesIO()
    trained = {n: p for n, p in first.model.named_parameters() if p.requires_grad}
    torch.save(
        {"extra": first.get_extra_state(), "trained": trained, "optimizer": optimizer.state_dict()}, file
    )
    again = loops(toolbox, inner_steps=2)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again.set_extra_state(state["extra"])
    with torch.no_grad():
        for name, p in again.model.named_parameters():
            if p.requires_grad:
                p.copy_(state["trained"][name])
    restored = torch.optim.AdamW([p for p in again.model.parameters() if p.requires_grad], lr=1e-2)
    restored.load_state_dict(state["optimizer"])
    found = update(again, restored, 3, 2)
    assert found == expected[3]
    assert again.practice is not None
    assert whole.practice is not None
    assert again.practice.state() == whole.practice.state()
    for (name, p), q in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_what_is_kept_of_an_experience_keeps_its_pictures() -> None:
    groups = (Group(prefix=(1,), rollouts=()), Group(prefix=(2,), rollouts=()))
    shown = [[(0, (0, 0, 8, 8))], []]
    rewards = {"task": torch.zeros(2, 2)}
    done = Experience(
        groups=groups, regions=[], texts=["a", "b", "c", "d"], masks=[], rewards=rewards, observed=shown
    )
    done = Experience.of(done.state())
    assert done.take([1]).observed == [[]]
    assert done.take([0]).observed == [[(0, (0, 0, 8, 8))]]


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
def test_a_phase_that_costs_accuracy_gives_the_weights_of_its_beginning_back(
    toolbox: Toolbox, tmp_path: Path
) -> None:
    rules = RewardPhases(
        base=PhaseEnd(threshold=0.5, slope=-9.0, steps=9),
        coherence=PhaseEnd(threshold=9.0, slope=-9.0, steps=9),
        every=1,
        allowed_loss=0.05,
    )
    module = loops(toolbox)
    own = practice(module.model, toolbox, rules)
    own.curriculum = own.curriculum.after(0.6, 0.0, rules)
    own.change_phase(0, module.policies, tmp_path)
    assert own.curriculum.phase == "coherence"
    before = {
        adapter: {n: t.clone() for n, t in module.policies.tensors(adapter).items()}
        for adapter in ("policy", "teacher")
    }
    updated(module, range(2))
    assert any(not torch.equal(t, before["policy"][n]) for n, t in module.policies.tensors("policy").items())
    own.curriculum = own.curriculum.after(0.54, 0.0, rules)
    own.change_phase(3, module.policies, tmp_path)
    assert (own.curriculum.phase, own.metrics()["agent/roll_backs"]) == ("base", 1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["base-0000001.safetensors"]
    for adapter, tensors in before.items():
        assert all(torch.equal(t, tensors[n]) for n, t in module.policies.tensors(adapter).items())


def test_a_tool_that_crashed_is_no_lesson_and_a_phase_decides_what_counts(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ans_core.agent.play.BROKEN", ("bad_box",))
    model = tiny.build()
    own = practice(model, toolbox)
    asked = question(NAMES[1])
    plans = [[zoom(500, 500, 100, 100)], [HALF], []]
    request = own.ask(asked)
    played = practices.play(model, toolbox, [request] * 3, limits=own.limits, plans=plans)
    crashed, called, at_once = (own._rewarded(asked, episode) for episode in played)
    assert math.isnan(crashed.rewards["task"])
    assert math.isnan(crashed.rewards["shaping"])
    assert called.rewards["shaping"] == pytest.approx(-0.05)  # easy needs no call
    assert at_once.rewards["shaping"] == 0.0
    assert (called.measured["not_needed/RaPR"], at_once.measured["RaPR"]) == (1.0, 0.0)


def test_a_look_at_the_thing_is_paid_right_or_wrong_and_only_where_one_is_needed(toolbox: Toolbox) -> None:
    model = tiny.build()
    own = practice(model, toolbox)
    for name, paid in zip(NAMES, (0.2, 0.0), strict=True):
        asked = question(name)
        looked = [call_text(call) for call in question(NAMES[0]).plan]
        elsewhere = [call_text(call) for call in question(NAMES[0]).distraction]
        played = practices.play(
            model, toolbox, [own.ask(asked)] * 2, limits=own.limits, plans=[looked, elsewhere]
        )
        first, second = (own._rewarded(asked, episode) for episode in played)
        assert first.rewards["task"] == second.rewards["task"] == 0.0
        assert first.rewards["shaping"] - second.rewards["shaping"] == pytest.approx(paid)


def test_the_bonus_of_curiosity_falls_to_zero_and_comes_back_only_before_that(toolbox: Toolbox) -> None:
    """Over 10 steps. While RaPR is .3 or more nothing is paid; where it falls below before the end, what is
    left of the bonus is."""
    model = tiny.build()
    own, asked = practice(model, toolbox), question(NAMES[0])
    called, at_once = practices.play(
        model, toolbox, [own.ask(asked)] * 2, limits=own.limits, plans=[[HALF], []]
    )

    def paid(steps: int, rapr: float, episode: PlayedEpisode = called) -> float:
        own.steps, own.use["pattern"] = steps, ToolUse(with_call=rapr, without=1 - rapr)
        return own._rewarded(asked, episode).measured["curiosity"]

    # half of .3 less .1, falling
    assert [paid(steps, 0.1) for steps in (0, 5, 9)] == pytest.approx([0.1, 0.05, 0.01])
    assert [paid(steps, 0.1) for steps in (10, 11, 100)] == [0.0, 0.0, 0.0]
    assert [paid(5, rapr) for rapr in (0.2, 0.3, 0.9, 0.2, 0.0)] == pytest.approx(
        [0.025, 0.0, 0.0, 0.025, 0.075]
    )
    assert paid(0, 0.0, at_once) == 0.0
    own.steps = 9
    assert own.metrics()["agent/curiosity_left"] == pytest.approx(0.1)
    own.end_rollouts(lambda counts: counts)
    assert (own.steps, own.metrics()["agent/curiosity_left"]) == (10, 0.0)


def test_a_run_stops_where_the_agent_has_unlearned_to_look(own_model: Network) -> None:
    with Toolbox(reader="template") as toolbox:
        own = practice(own_model, toolbox)
        own.settings = own.settings.model_copy(update={"least_calls": 0.5})

        def step(called: int, needing: int) -> None:
            own._needing += torch.tensor([called, needing])
            own.end_rollouts(lambda counts: counts)

        for _ in range(9):
            step(2, 6)
        step(0, 0)  # questions that need none say nothing
        assert len(own.looks) == 9
        again = practice(own_model, toolbox)
        again.load(own.state())
        assert again.looks == own.looks
        with pytest.raises(
            RuntimeError, match=r"rft: in 0\.33 of the episodes .* agent\.rft\.least_calls is 0\.5"
        ):
            step(2, 6)
        own.looks = [0.6] * 10
        step(3, 6)
