"""Where does the red circle go? A clip of which only the first frame is seen; following the thing tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ans_core.agent.episode import Observation
from ans_core.agent.protocol import Call
from ans_core.agent.world import drawing
from ans_core.agent.world.question import Family, Question, Target
from ans_core.data.clips import DIRECTIONS
from ans_core.data.scene_text import phrase
from ans_core.data.scenes import background, render
from ans_core.pictures import rle

FRAMES = 8
LENGTH = (0.25, 0.45)
"""Of the way, in shares of the side. It may lead out of the picture: the place in the first frame says
nothing about the direction."""


def draw(rng: np.random.Generator, side: int) -> Question:
    things = drawing.random_things(rng, int(rng.integers(2, 5)), least_meant=2)
    directions = [str(rng.choice(list(DIRECTIONS))) for _ in things]
    ways = [np.array(DIRECTIONS[direction]) * rng.uniform(*LENGTH) for direction in directions]
    canvas = background(rng, side)
    shots = []
    for time in np.linspace(0, 1, FRAMES):
        moved = (
            replace(t, x=t.x + float(w[0] * time), y=t.y + float(w[1] * time))
            for t, w in zip(things, ways, strict=True)
        )
        shots.append(render(tuple(moved), canvas))
    (index, query), (other, _) = drawing.meant(rng, things, 2)
    target = Target(phrase=phrase(query), masks=tuple(rle.encode(masks[index]) for _, masks, _ in shots))
    return Question(
        frames=tuple(drawing.png(image) for image, _, _ in shots),
        text=f"Where does {target.phrase} go?",
        answer=directions[index],
        choices=tuple(DIRECTIONS),
        targets=(target,),
        plan=(drawing.segment(target.masks[0]), Call(name="track_object", arguments={"mask": "mask_1"})),
        look="track",
        distraction=(drawing.segment(rle.encode(shots[0][1][other])),),
    )


def conclude(question: Question, observations: Sequence[Observation]) -> str | None:
    direction = observations[-1].values.get("direction") if observations else None
    return direction if direction in DIRECTIONS else None


MOVES = Family(draw=draw, conclude=conclude)
