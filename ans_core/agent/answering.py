"""A trained agent as a benchmark sees it: questions in words about pictures and clips -> its answers, with
operations or without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ans_core import prompts
from ans_core.agent import tokens
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import operations_told
from ans_core.agent.operations import Operation
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.policy import AgentPolicy
from ans_core.benchmarks.public.asked import Answerer, Item, Runner
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.types import Prediction, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentPrediction(Prediction):
    """An answer and what led to it; an episode that ran into a limit has no answer (an empty text)."""

    calls: int
    valid_calls: int
    over_turn: bool


def answerer(
    policy: AgentPolicy, toolbox: Toolbox, *, limits: EpisodeSettings, with_operations: bool, tools: bool
) -> Answerer:
    """Return the agent, asked greedily. `with_operations`: operations stand before every question. Without
    `tools` no call can be said; one that is spelled in another way is refused."""
    operations = operations_told(toolbox, with_operations and tools)
    forbidden = () if tools else tokens.call_openers(policy.model)
    allowed = {} if tools else {"calls": 0}

    def answer(items: Sequence[Item]) -> list[Prediction]:
        requests = [_request(item, operations) for item in items]
        episode = limits.model_copy(update=allowed | {"batch": len(items)})
        played = play(policy.model, toolbox, requests, limits=episode, forbidden=forbidden)
        return [_prediction(episode) for episode in played]

    return answer


def check(item: Item) -> None:
    """Raise ValueError for a question that is not in words alone."""
    request = item.request
    if request.mask_prompts or request.past or item.objects is not None or item.expression is not None:
        raise ValueError(
            f"question {item.name} is about regions or asks for masks; an agent answers in words, so leave "
            "--agent out"
        )


def _request(item: Item, operations: Mapping[str, Operation] | None) -> Request:
    check(item)
    pictures = len(item.request.frames) if item.request.stills else 1
    text = item.request.text.removeprefix(prompts.picture_marks(pictures).strip()).strip()
    return replace(item.request, text=tokens.first_question(text, operations, pictures=pictures))


def _prediction(played: PlayedEpisode) -> AgentPrediction:
    counts = played.episode.counts
    return AgentPrediction(
        text=played.answer or "", calls=counts["calls"], valid_calls=counts["ok"], over_turn=played.over_turn
    )


def counting(runner: Runner) -> Runner:
    """Return the runner with the calls of each episode in its record."""

    def record(item: Item, prediction: Prediction) -> dict[str, Any]:
        assert isinstance(prediction, AgentPrediction)
        calls = {
            "calls": prediction.calls,
            "valid_calls": prediction.valid_calls,
            "over_turn": prediction.over_turn,
        }
        return base_record(item, prediction) | calls

    base_record: Callable[[Item, Prediction], dict[str, Any]] = runner.record
    return replace(runner, record=record)


def note(records: Iterable[Mapping[str, Any]]) -> str:
    """Say how often operations were used. RaPR: the share of episodes with a call that gave something."""
    listed = list(records)
    used = sum(record["valid_calls"] > 0 for record in listed) / len(listed)
    calls, over = (sum(record[key] for record in listed) for key in ("calls", "over_turn"))
    return (
        f"RaPR {used:.3f}, {calls / len(listed):.2f} calls an episode; {over} of {len(listed)} ran into a "
        "limit, without an answer"
    )
