"""Which colour is the large star? Answered from the overview; an operation is a waste."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ans_core.agent.episode import Observation
from ans_core.agent.world import drawing
from ans_core.agent.world.question import Family, Question
from ans_core.data.scene_text import Query, phrase, resolve
from ans_core.pictures.colours import COLOURS


def draw(rng: np.random.Generator, side: int) -> Question:
    while True:
        things = drawing.random_things(rng, int(rng.integers(2, 5)))
        queries = [(i, Query(size=thing.size, shape=thing.shape)) for i, thing in enumerate(things)]
        candidates = [(i, query) for i, query in queries if resolve(query, things) == (i,)]
        if candidates:
            break
    index, query = candidates[int(rng.integers(len(candidates)))]
    scene = drawing.draw(rng, side, things)
    return Question(
        frames=(drawing.png(scene.image),),
        text=f"Which colour is {phrase(query)}?",
        answer=things[index].colour,
        choices=tuple(COLOURS),
        targets=(scene.target(index, query),),
    )


def conclude(question: Question, observations: Sequence[Observation]) -> str | None:
    return question.answer


EASY = Family(draw=draw, conclude=conclude, needs_operation=False)
