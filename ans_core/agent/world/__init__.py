"""(seed, family, split, index) -> a drawn question, and the oracle: its shortest plan on the real
operations."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ans_core.agent.episode import Episode, Observation, Toolbox
from ans_core.agent.protocol import call_text
from ans_core.agent.world.annotated import WHAT_IS_WRITTEN
from ans_core.agent.world.annotated_clips import STILL_THERE, WHICH_WAY, still_there
from ans_core.agent.world.drawing import SHRINKS
from ans_core.agent.world.families import FAMILIES, OPERATED
from ans_core.agent.world.question import Family, Question, evidence, is_right
from ans_core.data.scenes import SPLITS

TILE = 96
"""Of the `tiny` profile: its pictures have 384 pixels on a side."""


def draw_question(family: str, *, seed: int, split: str, index: int, tile: int = TILE) -> Question:
    """Depends on its arguments alone; other splits, families and indices draw other scenes. Pictures have
    SHRINKS times the tile's side.

    Raises ValueError for a family or split that does not exist."""
    if family not in FAMILIES:
        raise ValueError(f"no family named {family!r}; ans_core/agent/world/families has {sorted(FAMILIES)}")
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are {list(SPLITS)}")
    rng = np.random.default_rng([seed, zlib.crc32(family.encode()), SPLITS.index(split), index])
    question = FAMILIES[family].draw(rng, SHRINKS * tile)
    return replace(question, question_id=f"{family}/{split}/{index}", family=family)


OF_PICTURES: dict[str, Callable[[Question, Sequence[Observation]], str | None]] = {
    WHAT_IS_WRITTEN: FAMILIES["text"].conclude,
    WHICH_WAY: FAMILIES["moves"].conclude,
    STILL_THERE: still_there,
}
"""What observations say of questions about annotated pictures; of all others, whoever looks reads the answer,
as in `pattern`."""


def conclusion(question: Question, observations: Sequence[Observation]) -> str | None:
    """Return the answer that the shortest plan's observations give."""
    if question.family in FAMILIES:
        return FAMILIES[question.family].conclude(question, observations)
    conclude = OF_PICTURES.get(question.family)
    return conclude(question, observations) if conclude else question.answer


def oracle(question: Question, toolbox: Toolbox) -> Episode:
    """Return the episode of the shortest plan, without an answer where a call failed, at which it stops. The ceiling
    of what a policy can reach with these operations."""
    episode = Episode(toolbox, question.workspace(), max_calls=len(question.plan))
    for call in question.plan:
        observation = episode.turn(call_text(call))
        assert observation is not None
        if not observation.ok:
            return episode
    episode.answer = conclusion(question, episode.observations)
    return episode


__all__ = [
    "FAMILIES",
    "OPERATED",
    "Family",
    "Question",
    "conclusion",
    "draw_question",
    "evidence",
    "is_right",
    "oracle",
]
