"""Which pattern is on the red square? Its period is at the overview's sampling rate: only a closer look shows it,
at a part of the thing where that is large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ans_core.agent.episode import Observation
from ans_core.agent.world import drawing
from ans_core.agent.world.drawing import PATTERNS
from ans_core.agent.world.question import Family, Question

PRIOR = 0.2
"""Share of things that carry their colour's favourite, beside those that do by chance: .2 + .8 / 4 = .4 in
all."""


def draw(rng: np.random.Generator, side: int) -> Question:
    things = drawing.random_things(rng, int(rng.integers(2, 5)), least_meant=2)
    scene = drawing.draw(rng, side, things)
    patterns = []
    for thing, mask in zip(things, scene.masks, strict=True):
        liked = PATTERNS[drawing.favourite(thing.colour, len(PATTERNS))]
        patterns.append(liked if rng.random() < PRIOR else str(rng.choice(PATTERNS)))
        drawing.paint_pattern(scene.image, mask, patterns[-1])
    (index, query), (other, other_query) = drawing.meant(rng, things, 2)
    target = replace(scene.target(index, query), part=True)
    return Question(
        frames=(drawing.png(scene.image),),
        text=f"Which pattern is on {target.phrase}?",
        answer=patterns[index],
        choices=PATTERNS,
        prior=PATTERNS[drawing.favourite(things[index].colour, len(PATTERNS))],
        targets=(target,),
        plan=(drawing.zoom_inside(target.masks[0]),),
        distraction=(drawing.zoom_inside(scene.target(other, other_query).masks[0]),),
    )


def conclude(question: Question, observations: Sequence[Observation]) -> str | None:
    """A crop says nothing by itself: whoever looks at it reads the pattern, so the oracle's answer is the
    true one where it was shown."""
    return question.answer if observations and observations[-1].pictures else None


PATTERN = Family(draw=draw, conclude=conclude)
