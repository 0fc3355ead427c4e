"""Which is larger, the red circle or the blue star? Areas of a ratio of 1.2 to 1.8: measured, not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ans_core.agent.episode import Observation
from ans_core.agent.protocol import Call
from ans_core.agent.world import drawing
from ans_core.agent.world.question import Family, Question
from ans_core.data.scene_text import phrase, resolve
from ans_core.data.scenes import Thing, outline

RATIO = (1.2, 1.8)
"""Of the two areas. Both things have the same size word."""


def draw(rng: np.random.Generator, side: int) -> Question:
    while True:
        things = drawing.unplaced(rng, int(rng.integers(2, 5)), least_meant=2)
        (larger, query), (smaller, other_query) = drawing.meant(rng, things, 2)
        if things[larger].size != things[smaller].size:
            continue
        step = float(np.sqrt(rng.uniform(*RATIO)))
        middle = float(np.sqrt(_area(things[larger]) * _area(things[smaller])))
        things[larger] = _with_area(things[larger], middle * step)
        things[smaller] = _with_area(things[smaller], middle / step)
        placed = drawing.place(rng, things)
        if placed is not None:
            break
    scene = drawing.draw(rng, side, placed)
    targets = []
    for wanted in (query, other_query):
        (index,) = resolve(wanted, placed) or ()
        targets.append(scene.target(index, wanted))
    first, second = (targets[i] for i in rng.permutation(2))
    segments = [drawing.segment(target.masks[0]) for target in (first, second)]
    compare = Call(name="get_properties", arguments={"masks": ["mask_1", "mask_2"], "properties": ["rank"]})
    return Question(
        frames=(drawing.png(scene.image),),
        text=f"Which is larger, {first.phrase} or {second.phrase}?",
        answer=phrase(query),
        choices=(first.phrase, second.phrase),
        targets=(first, second),
        plan=(*segments, compare),
        look="mask",
        distraction=(drawing.zoom(first.masks[0]),),
    )


def _area(thing: Thing) -> float:
    """In shares of the picture, by the shoelace formula."""
    x, y = outline(thing).T
    return float(abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2)


def _with_area(thing: Thing, area: float) -> Thing:
    return replace(thing, radius=thing.radius * float(np.sqrt(area / _area(thing))))


def conclude(question: Question, observations: Sequence[Observation]) -> str | None:
    """mask_1 is that of the thing named first."""
    values = observations[-1].values if observations else {}
    ranks = [values.get(name, {}).get("rank") for name in ("mask_1", "mask_2")]
    return question.choices[ranks.index(1)] if 1 in ranks else None


LARGER = Family(draw=draw, conclude=conclude)
