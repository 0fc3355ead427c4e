"""What is written on the blue circle? Two digits of 10 pixels: hard to read in the overview, read by
READ_TEXT in a crop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ans_core.agent.episode import Observation
from ans_core.agent.protocol import Call
from ans_core.agent.world import drawing
from ans_core.agent.world.question import Family, Question

NUMBERS = tuple(str(n) for n in range(10, 100))
PRIOR = 0.4
"""Share of things that carry their colour's favourite."""


def draw(rng: np.random.Generator, side: int) -> Question:
    things = drawing.random_things(rng, int(rng.integers(2, 5)), least_meant=2)
    scene = drawing.draw(rng, side, things)
    texts = []
    for thing, mask in zip(things, scene.masks, strict=True):
        texts.append(_liked(thing.colour) if rng.random() < PRIOR else str(rng.choice(NUMBERS)))
        drawing.write(scene.image, mask, texts[-1], thing.rgb)
    (index, query), (other, other_query) = drawing.meant(rng, things, 2)
    target = scene.target(index, query)
    return Question(
        frames=(drawing.png(scene.image),),
        text=f"What is written on {target.phrase}?",
        answer=texts[index],
        prior=_liked(things[index].colour),
        targets=(target,),
        plan=(drawing.zoom(target.masks[0]), Call(name="read_text", arguments={"image": "image_2"})),
        distraction=(drawing.zoom(scene.target(other, other_query).masks[0]),),
    )


def _liked(colour: str) -> str:
    """17, 28, 39, ... of the colours in their order."""
    return NUMBERS[7 + 11 * drawing.favourite(colour, 8)]


def conclude(question: Question, observations: Sequence[Observation]) -> str | None:
    """The surest line."""
    lines = observations[-1].values.get("lines", []) if observations else []
    return str(max(lines, key=lambda line: line["confidence"])["text"]) if lines else None


TEXT = Family(draw=draw, conclude=conclude)
