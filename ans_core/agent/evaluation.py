"""Played episodes of drawn questions -> figures by family: accuracy, how often operations are used, and whether answers rest on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ans_core.agent import tokens
from ans_core.agent.episode import Toolbox
from ans_core.agent.operations import Operation
from ans_core.agent.play import PlayedEpisode
from ans_core.agent.world import FAMILIES, Question, draw_question, evidence, is_right
from ans_core.types import Request

NEEDED = "needed"
"""Mean over the families that need an operation."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one question."""

    question: Question
    answer: str | None
    right: bool
    used: bool
    """At least one call gave something."""
    evidence: bool
    """What is asked about was looked at."""
    calls: int = 0
    valid_calls: int = 0
    over_turn: bool = False
    said: int = 0
    """Tokens."""


def outcome_of(question: Question, played: PlayedEpisode) -> Outcome:
    counts = played.episode.counts
    return Outcome(
        question=question,
        answer=played.answer,
        right=played.answer is not None and is_right(played.answer, question),
        used=counts["ok"] > 0,
        evidence=evidence(question, played.episode.workspace),
        calls=counts["calls"],
        valid_calls=counts["ok"],
        over_turn=played.over_turn,
        said=sum(len(turn.ids) for turn in played.turns),
    )


def held_out_names(families: Sequence[str], *, each: int, first: int = 0) -> list[tuple[str, int]]:
    """Return (family, index) of `each` questions of every family, from index `first`; families take turns, so that a batch has some of
    each."""
    return [(family, first + i) for i in range(each) for family in families]


def held_out(families: Sequence[str], *, each: int, split: str, seed: int, tile: int, first: int = 0) -> list[Question]:
    """Draw the questions of `held_out_names`."""
    names = held_out_names(families, each=each, first=first)
    return [draw_question(family, seed=seed, split=split, index=index, tile=tile) for family, index in names]


def request_of(question: Question, operations: Mapping[str, Operation] | None = None) -> Request:
    """Return the question as `play` takes it; `operations`: those that are told."""
    return Request(frames=question.frames, text=tokens.first_question(question.text, operations), clip=len(question.frames) > 1)


def operations_told(toolbox: Toolbox, told: bool) -> Mapping[str, Operation] | None:
    return toolbox.operations if told else None


def metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return figures by family, and their means over the families that need an operation (`needed/`), a family without a figure left out.

    RaPR: share of episodes with a call that gave something (Pixel-Reasoner's rate of pixel-space reasoning). accuracy_tool and
    accuracy_no_tool: over episodes with and without one. evidence: share of right answers whose question was looked at; prior: share of
    questions whose answer is what the words suggest.
    """
    by_family = {name: [o for o in outcomes if o.question.family == name] for name in FAMILIES}
    found = {name: _of_family(own) for name, own in by_family.items() if own}
    flat = {f"{name}/{key}": value for name, own in found.items() for key, value in own.items()}
    needing = [own for name, own in found.items() if FAMILIES[name].needs_operation]
    for key in dict.fromkeys(key for own in needing for key in own):
        values = [own[key] for own in needing if key in own]
        flat[f"{NEEDED}/{key}"] = sum(values) / len(values)
    return flat


def _of_family(outcomes: Sequence[Outcome]) -> dict[str, float]:
    parts: dict[str, list[bool]] = {
        "accuracy": [o.right for o in outcomes],
        "RaPR": [o.used for o in outcomes],
        "accuracy_tool": [o.right for o in outcomes if o.used],
        "accuracy_no_tool": [o.right for o in outcomes if not o.used],
        "evidence": [o.evidence for o in outcomes if o.right],
        "over_turn": [o.over_turn for o in outcomes],
        "prior": [o.question.prior == o.question.answer for o in outcomes if o.question.prior is not None],
    }
    found = {name: sum(values) / len(values) for name, values in parts.items() if values}
    calls = sum(o.calls for o in outcomes)
    if calls:
        found["valid_calls"] = sum(o.valid_calls for o in outcomes) / calls
    return found | {
        "calls": calls / len(outcomes),
        "tokens": sum(o.said for o in outcomes) / len(outcomes),
        "questions": float(len(outcomes)),
    }


def accuracy(outcomes: Sequence[Outcome]) -> float:
    """Mean over all questions."""
    return sum(o.right for o in outcomes) / len(outcomes)
