"""Votes on one question -> a label, its share, and who voted how. Voters: the question's own rollouts, its
near-duplicates' labels."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ans_core.agent.world.question import normal

Strategy = Literal["majority", "weighted"]
OMEGA = 5.0
"""How much more a verified vote weighs (T3RL)."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One voice. None = no answer: it counts for nobody, but against every share, as one unverified voice
    without doubt."""

    source: str
    """`rollout 3` or `experience 17`."""
    answer: str | None
    verified: bool = False
    """An independent operation path gives the same answer."""
    by: str = ""
    """How that path found the thing: `words` or `place`; `person's mask`: the rollout looked at what a person has
    shown; `person`."""

    @property
    def label(self) -> str | None:
        """What equal answers have in common."""
        return None if self.answer is None else normal(self.answer)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the votes come to. share: of all weight, abstentions included; 0 without a label."""

    label: str | None
    share: float
    verified: bool
    """At least one vote for the label was verified."""
    strategy: Strategy
    votes: tuple[Vote, ...]

    def with_label(self, label: str) -> Decision:
        """Return the decision for a label that is given, whatever the votes are."""
        return replace(self, label=normal(label), share=1.0, verified=True)

    def provenance(self) -> tuple[dict[str, Any], ...]:
        return tuple(asdict(vote) | {"strategy": self.strategy} for vote in self.votes)


def decide(votes: Sequence[Vote], strategy: Strategy) -> Decision:
    """Choose the label with the largest share; of equal ones the first in the alphabet, so that the order of
    the votes does not count."""
    by_answer = shares(votes, strategy)
    label = min(by_answer, key=lambda answer: (-by_answer[answer], answer)) if by_answer else None
    return Decision(
        label=label,
        share=by_answer[label] if label is not None else 0.0,
        verified=any(vote.verified and vote.label == label for vote in votes),
        strategy=strategy,
        votes=tuple(votes),
    )


def entropy(votes: Sequence[Vote]) -> float | None:
    """Return the entropy of the answers, each vote counted once, as a share of the largest that so many votes
    can have: 0 if all are equal, 1 if no two are. Abstentions are left out; None with fewer than two
    answers."""
    counts = Counter(vote.label for vote in votes if vote.label is not None)
    total = counts.total()
    if total < 2:
        return None
    return sum(count / total * math.log(total / count) for count in counts.values()) / math.log(total)


def shares(votes: Sequence[Vote], strategy: Strategy) -> dict[str, float]:
    """Return every answer's share of the weight, abstentions included."""
    omega = OMEGA if strategy == "weighted" else 0.0
    weights: dict[str | None, float] = defaultdict(float)
    for vote in votes:
        weights[vote.label] += 1.0 if vote.label is None else 1 + omega * vote.verified
    total = sum(weights.values())
    return {answer: weight / total for answer, weight in weights.items() if answer is not None}
