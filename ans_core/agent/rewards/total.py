"""An episode's reward: right or wrong, and within narrow limits how it was done."""

from __future__ import annotations

from collections.abc import Mapping

from ans_core.agent.episode import Episode
from ans_core.agent.rewards.coherence import coherence
from ans_core.agent.rewards.curiosity import price
from ans_core.agent.rewards.penalties import penalties
from ans_core.agent.world import Question

LIMIT = 0.4
"""Of the shaping. Below half of what a right answer earns: a right answer earns 0.6 at least, a wrong one 0.4
at most."""


def episode_parts(
    question: Question, episode: Episode, *, evidence: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the parts that an episode earns whatever the state of training is, before their weights, and the
    penalties by name. Parts: `evidence` (a look at all things asked about, where one is needed), `coherence`,
    `price` of calls beyond the wanted ones, `penalty`."""
    faults = penalties(episode.observations, answer=episode.answer)
    parts = {
        "evidence": float(bool(question.plan) and evidence),
        "coherence": coherence(episode.observations, plan=question.plan),
        "price": price(calls=len(episode.observations), shortest=question.wanted_calls),
        "penalty": sum(faults.values(), 0.0),
    }
    return parts, faults


def shaping(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of those parts that have a weight, within +-LIMIT."""
    return max(-LIMIT, min(LIMIT, sum(weight * parts[name] for name, weight in weights.items())))
