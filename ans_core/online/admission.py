"""A decision -> whether it may be learned from. What labels are common, and which of them change from visit
to visit, is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ans_core.online.store import Task, Verdict
from ans_core.online.voting import Decision

MEMORY = 0.98
"""Decay of the counts of labels, per label."""
WEIGHT_LIMITS = (0.2, 2.0)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """share: of the votes, from which a label is trusted. verification: a label also needs a verified vote.
    flips: share of visits that may have changed the label."""

    share: float = 0.7
    verification: bool = True
    flips: float = 0.34

    def verdict(self, task: Task, decision: Decision) -> Verdict:
        if decision.label is None:
            return "no_answer"
        if decision.share < self.share:
            return "below_gate"
        if self.verification and not decision.verified:
            return "not_verified"
        flips = task.flips + (task.label is not None and task.label != decision.label)
        if task.visits and flips / (task.visits + 1) > self.flips:
            return "flipped"
        return "admitted"


@dataclass(kw_only=True)
class Marginal:
    """How common each label is among those that were learned, by form of question."""

    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Form -> label -> how often it came; older ones count less."""

    def weight(self, form: str, label: str) -> float:
        """Return clip(1 / (K m(label)), .2, 2) for the K labels of this form that came so far, m being their
        decayed shares: a label that becomes the only one loses its weight.

        K counts labels that came, not answers that could: then the mean weight of what comes is sum m / (K m)
        = 1, however few labels are known. With the number of possible answers, the first labels would lose
        weight because others have not come yet: the first of four would weigh .25. A label keeps its place in
        K when it has become rare; else one that drives the others out would weigh 1 again. A label alone
        weighs 1, for nothing tells yet whether it is common; so does a new one, which may be noise."""
        counts = self.counts.get(form, {})
        if label not in counts:
            return 1.0
        low, high = WEIGHT_LIMITS
        return min(high, max(low, sum(counts.values()) / (len(counts) * counts[label])))

    def add(self, form: str, label: str) -> None:
        counts = self.counts.setdefault(form, {})
        for other in counts:
            counts[other] *= MEMORY
        counts[label] = counts.get(label, 0.0) + 1.0

    def largest(self) -> float:
        """Return the share of the most common label of any form with several; 0 without any."""
        return max(
            (
                max(counts.values()) / sum(counts.values())
                for counts in self.counts.values()
                if len(counts) > 1
            ),
            default=0.0,
        )

    def state(self) -> dict[str, Any]:
        return {form: dict(counts) for form, counts in self.counts.items()}

    @classmethod
    def of(cls, state: Mapping[str, Mapping[str, float]]) -> Marginal:
        return cls(counts={form: dict(counts) for form, counts in state.items()})
