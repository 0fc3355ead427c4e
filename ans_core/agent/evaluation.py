"""Played episodes of questions -> figures by family: accuracy, how often operations are used, and
whether answers rest on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ans_core.agent import tokens
from ans_core.agent.episode import Episode, Toolbox
from ans_core.agent.operations import Operation
from ans_core.agent.play import PlayedEpisode
from ans_core.agent.world import FAMILIES, OPERATED, Question, evidence, is_right
from ans_core.agent.world.annotated_clips import FAMILIES_OF_PICTURES
from ans_core.agent.world.question import faithful_calls
from ans_core.agent.world.question_sets import is_question_set
from ans_core.types import Request

CHANCE = 0.025
"""How often chance may pass for a loss (`costs`)."""
NEEDED = "needed"
"""Mean over the drawn families that need an operation."""
PICTURES = "pictures"
"""Mean over the families of questions about annotated pictures."""
QUESTION_SETS = "question_sets"
"""Mean over the sets of questions and answers."""


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
    faithful_calls: int = 0
    """Of the valid ones, those about a thing that the question is about."""
    over_turn: bool = False
    token_count: int = 0
    """Tokens."""
    ended: str = "answer"
    """See `play.Ended`."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Calls that were refused or failed, by kind (`refusal.ErrorKind`)."""


def outcome_of_episode(question: Question, episode: Episode) -> Outcome:
    """Return what its calls and its answer say, whoever made them."""
    counts = episode.counts
    return Outcome(
        question=question,
        answer=episode.answer,
        right=episode.answer is not None and is_right(episode.answer, question),
        used=counts["ok"] > 0,
        evidence=evidence(question, episode.workspace, episode.observations),
        calls=counts["calls"],
        valid_calls=counts["ok"],
        faithful_calls=faithful_calls(question, episode.workspace, episode.observations),
    )


def outcome_of(question: Question, played: PlayedEpisode) -> Outcome:
    return replace(
        outcome_of_episode(question, played.episode),
        over_turn=played.over_turn,
        token_count=sum(len(turn.ids) for turn in played.turns),
        ended=played.ended,
        errors={
            kind: number for kind, number in played.episode.counts.items() if kind not in ("calls", "ok")
        },
    )


def looked(question: Question, played: PlayedEpisode) -> bool:
    """Return the episode's `evidence`."""
    return evidence(question, played.episode.workspace, played.episode.observations)


def request_of(question: Question, operations: Mapping[str, Operation] | None = None) -> Request:
    """Return the question as `play` takes it; `operations`: those that are told."""
    return Request(
        frames=question.frames,
        text=tokens.first_question(
            question.text, operations, pictures=len(question.frames) if question.stills else 1
        ),
        stills=question.stills,
    )


def costs(before: Sequence[bool], after: Sequence[bool], allowed: float) -> bool:
    """Tell whether accuracy on the same questions, if there are any, went down by more than `allowed`, and by
    more than chance: of the questions that are answered differently, as many or more turn out wrong less than
    once in forty where right and wrong are as likely (McNemar's exact test, one-sided). With few questions an
    accuracy at the level of guessing moves by itself."""
    if not before:
        return False
    wrong = sum(was and not now for was, now in zip(before, after, strict=True))
    right = sum(now and not was for was, now in zip(before, after, strict=True))
    if (wrong - right) / len(before) <= allowed + 1e-9:
        return False
    from scipy.stats import binomtest  # takes half a second

    return float(binomtest(wrong, wrong + right, alternative="greater").pvalue) < CHANCE


def operations_told(toolbox: Toolbox, listed: bool) -> Mapping[str, Operation] | None:
    return toolbox.operations if listed else None


def metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return figures by family, and their means over the drawn families that need an operation (`needed/`),
    over those about annotated pictures (`pictures/`) and over sets of questions and answers (`question_sets/`),
    a family without a figure left out.

    RaPR: share of episodes with a call that gave something (Pixel-Reasoner's rate of pixel-space reasoning).
    accuracy_tool and accuracy_no_tool: over episodes with and without one. evidence: share of right answers
    whose question was looked at; prior: what guessing by the words alone gets. faithful_calls: share of the
    successful calls that are about a thing asked about, whatever is answered. Over all episodes:
    `errors/<kind>`, failed calls an episode, and `ended/<limit>`, the share that ran into it.
    """
    sets = sorted({o.question.family for o in outcomes if is_question_set(o.question.family)})
    families = (*FAMILIES, *FAMILIES_OF_PICTURES, *sets)
    by_family = {name: [o for o in outcomes if o.question.family == name] for name in families}
    figures = {name: _of_family(one) for name, one in by_family.items() if one}
    flat = {f"{name}/{key}": value for name, one in figures.items() for key, value in one.items()}
    groups = {
        NEEDED: OPERATED,
        PICTURES: FAMILIES_OF_PICTURES,
        QUESTION_SETS: sets,
    }
    for group, names in groups.items():
        members = [figures[name] for name in names if name in figures]
        for key in dict.fromkeys(key for one in members for key in one):
            values = [one[key] for one in members if key in one]
            flat[f"{group}/{key}"] = sum(values) / len(values)
    for kind in sorted({kind for o in outcomes for kind in o.errors}):
        flat[f"errors/{kind}"] = sum(o.errors.get(kind, 0) for o in outcomes) / len(outcomes)
    for limit in sorted({o.ended for o in outcomes} - {"answer"}):
        flat[f"ended/{limit}"] = sum(o.ended == limit for o in outcomes) / len(outcomes)
    return flat


def _of_family(outcomes: Sequence[Outcome]) -> dict[str, float]:
    known = [o for o in outcomes if o.question.plan_known]
    parts: dict[str, Sequence[float]] = {
        "accuracy": [o.right for o in outcomes],
        "RaPR": [o.used for o in outcomes],
        "accuracy_tool": [o.right for o in outcomes if o.used],
        "accuracy_no_tool": [o.right for o in outcomes if not o.used],
        "evidence": [o.evidence for o in known if o.right],
        "over_turn": [o.over_turn for o in outcomes],
        "prior": [guessed(o.question) for o in outcomes],
    }
    figures = {name: sum(values) / len(values) for name, values in parts.items() if values}
    calls = sum(o.calls for o in outcomes)
    if calls:
        figures["valid_calls"] = sum(o.valid_calls for o in outcomes) / calls
    if valid := sum(o.valid_calls for o in known):
        figures["faithful_calls"] = sum(o.faithful_calls for o in known) / valid
    return figures | {
        "calls": calls / len(outcomes),
        "tokens": sum(o.token_count for o in outcomes) / len(outcomes),
        "questions": float(len(outcomes)),
    }


def guessed(question: Question) -> float:
    """Return how often the question's answer is guessed right without looking: whether it is what the words
    suggest, or one of the choices."""
    if question.prior is not None:
        return float(question.prior == question.answer)
    return 1 / len(question.choices) if question.choices else 0.0


def accuracy(outcomes: Sequence[Outcome]) -> float:
    """Mean over all questions."""
    return sum(o.right for o in outcomes) / len(outcomes)
