"""Played episodes: what is read again is what was said, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ans_core.agent import tokens
from ans_core.agent.crops import CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.protocol import Call, call_text
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.rl.rollout import Group, Reader, pack, token_logps
from ans_core.types import Request
from tests import tiny
from tests.golden import GOLDEN
from tests.rl.test_observed_pictures import model_of

LIMITS = EpisodeSettings(turn_tokens=6)
FIRST, SECOND = [0, 0, 500, 500], [200, 200, 900, 800]


def zoom(box: list[int], image: str = "image_1") -> str:
    return call_text(Call(name="zoom_in", arguments={"bbox_2d": box, "image": image}))


PLANS = [[], [zoom(FIRST)], [zoom(FIRST), zoom(SECOND, "image_2")], ["<tool_call>{}", zoom(SECOND)]]


def asked(number: int) -> Request:
    return Request(frames=(tiny.picture(number),), text=tokens.first_question("What is there?"))


def reader(model: Network) -> Reader:
    return Reader(temperature=1.0, forbidden=[model.image_token_id], guard="guard")


@pytest.fixture
def played(tiny_model: Network, toolbox: Toolbox) -> list[PlayedEpisode]:
    """Four rollouts of one question, with 0, 1, 2 and 1 crops."""
    return play(
        tiny_model, toolbox, [asked(1)] * 4, limits=LIMITS, reader=reader(tiny_model), seeds=[1, 2, 3, 4], plans=PLANS
    )  # fmt: skip


def test_a_packed_group_gives_the_log_probabilities_that_were_sampled(
    tiny_model: Network, played: list[PlayedEpisode]
) -> None:
    group = Group(prefix=played[0].prefix, rollouts=tuple(episode.rollout for episode in played))
    fields: dict[str, Any] = pack([group], pad_id=0)[0]
    crops = [played[0].overviews[0], *(crop for episode in played for crop in episode.crops[1:])]
    features = CropFeatures(tiny_model)
    image = ImageFeatures.joined([tiny_model.project(f) for f in features.of(crops)])
    packed = Packed(**fields)
    logps, _ = token_logps(tiny_model, packed, tiny_model.hidden_states(packed, [image]), reader(tiny_model))
    sampled = [p for episode in played for p in episode.logps]
    assert len(sampled) == sum(len(s.ids) for e in played for s in e.rollout if s.trainable) > 4
    assert torch.allclose(logps, torch.tensor(sampled), atol=1e-4)
    assert [len(episode.crops) for episode in played] == [1, 2, 3, 2]
    # the overview, the first box in two episodes, the second in the first's and in the whole picture
    assert features.encoded == 4


@pytest.mark.slow
@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference outputs")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_pictures_of_later_turns_have_the_positions_with_which_they_are_read_again(
    kind: str, toolbox: Toolbox
) -> None:
    """Qwen-VL counts in three rows: a wide and a tall crop move what comes after them by other numbers than
    their cells."""
    model = model_of(kind)
    small = replace(model.config, min_pixels=28 * 28 * 6, max_pixels=28 * 28 * 12)
    model.backbone.cutter = model.backbone.cutter_of(model.backbone.native.config, small)
    wide, tall = zoom([0, 0, 1000, 400]), zoom([0, 0, 500, 1000], "image_2")
    episodes = play(
        model, toolbox, [asked(1)] * 3, limits=LIMITS, reader=reader(model), seeds=[1, 2, 3], plans=[[], [wide], [wide, tall]]
    )  # fmt: skip
    assert [len(episode.crops) for episode in episodes] == [1, 2, 3]
    group = Group(prefix=episodes[0].prefix, rollouts=tuple(episode.rollout for episode in episodes))
    crops = [episodes[0].overviews[0], *(crop for episode in episodes for crop in episode.crops[1:])]
    image = ImageFeatures.joined([model.project(f) for f in CropFeatures(model).of(crops)])
    packed = Packed(**dict[str, Any](pack([group], pad_id=0)[0]))
    logps, _ = token_logps(model, packed, model.hidden_states(packed, [image]), reader(model))
    sampled = [p for episode in episodes for p in episode.logps]
    assert torch.allclose(logps, torch.tensor(sampled), atol=1e-4)


def test_an_episode_does_not_depend_on_the_others_of_its_batch(
    tiny_model: Network, toolbox: Toolbox, played: list[PlayedEpisode]
) -> None:
    for number in (1, 2):
        (alone,) = play(
            tiny_model, toolbox, [asked(1)], limits=LIMITS, reader=reader(tiny_model), seeds=[number + 1], plans=[PLANS[number]]
        )  # fmt: skip
        assert [turn.ids for turn in alone.turns] == [turn.ids for turn in played[number].turns]
        assert alone.logps == pytest.approx(played[number].logps, abs=1e-4)


def test_errors_come_back_and_limits_end_an_episode(tiny_model: Network, toolbox: Toolbox) -> None:
    plans = [[zoom(FIRST)] * 4, ["<tool_call>{}", zoom(SECOND)], [zoom(FIRST)] * 2, [zoom(FIRST)]]
    limits = EpisodeSettings(calls=2, pictures=3, turn_tokens=4)
    over, mended, right, short = play(
        tiny_model, toolbox, [asked(i) for i in range(4)], limits=limits, plans=plans
    )
    assert over.over_turn
    assert over.ended == "calls"
    assert over.answer is None
    assert over.episode.counts == {"calls": 4, "ok": 2, "call_limit": 2}
    assert mended.turns[0].shown is not None
    assert mended.turns[0].shown.text.startswith("Error: ")
    assert mended.episode.counts == {"calls": 2, "ok": 1, "broken_call": 1}
    assert right.successful_calls == 2
    # it knows no end within 4 tokens
    assert (right.ended, right.answer, right.turns[-1].complete) == ("turn_tokens", None, False)
    assert (right.over_turn, right.is_lesson, over.is_lesson) == (True, True, False)
    (crowded,) = play(
        tiny_model,
        toolbox,
        [asked(0)],
        limits=EpisodeSettings(pictures=2, turn_tokens=4),
        plans=[[zoom(FIRST)] * 2],
    )
    assert crowded.ended == "pictures"
    assert len(crowded.crops) == 2
    (long,) = play(
        tiny_model,
        toolbox,
        [asked(0)],
        limits=EpisodeSettings(tokens=len(short.opening) + 20),
        plans=[[zoom(FIRST)]],
    )
    assert long.ended == "tokens"
    assert len(long.turns) == 1


@pytest.mark.slow
def test_log_probabilities_of_a_batch_of_eight_are_those_of_eight_batches_of_one(
    tiny_model: Network, toolbox: Toolbox
) -> None:
    """Sampled and learned, of episodes about unlike pictures, with 0 to 2 crops and rows of unlike
    lengths."""
    requests, plans = [asked(number) for number in range(8)], PLANS * 2
    features, seeds = CropFeatures(tiny_model), list(range(8))
    own: dict[str, Any] = {"reader": reader(tiny_model), "features": features}
    together = play(tiny_model, toolbox, requests, seeds=seeds, plans=plans, limits=LIMITS, **own)
    alone = play(
        tiny_model,
        toolbox,
        requests,
        seeds=seeds,
        plans=plans,
        limits=LIMITS.model_copy(update={"batch": 1}),
        **own,
    )
    assert len({episode.rollout[-1].ids for episode in together}) > 4
    groups = [Group(prefix=episode.prefix, rollouts=(episode.rollout,)) for episode in together]
    images = [
        ImageFeatures.joined([tiny_model.project(f) for f in features.of(episode.crops)])
        for episode in together
    ]
    learned = _learned(tiny_model, groups, images)
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert [turn.ids for turn in one.turns] == [turn.ids for turn in other.turns]
        assert one.logps == pytest.approx(other.logps, abs=1e-4)
        (by_itself,) = _learned(tiny_model, groups[number : number + 1], images[number : number + 1])
        assert torch.allclose(learned[number], by_itself, atol=1e-4)
        assert torch.allclose(learned[number], torch.tensor(one.logps), atol=1e-4)


def _learned(model: Network, groups: list[Group], images: list[Any]) -> list[torch.Tensor]:
    """Log-probabilities of what each group's episode said, read in one batch."""
    fields: dict[str, Any] = pack(groups, pad_id=0)[0]
    packed = Packed(**fields)
    logps, _ = token_logps(model, packed, model.hidden_states(packed, images), reader(model))
    return list(logps.split([sum(len(s.ids) for s in group.rollouts[0] if s.trainable) for group in groups]))
