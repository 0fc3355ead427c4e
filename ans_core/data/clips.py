"""Draw (seed, split, index) -> a short clip of moving, crossing, leaving and entering things, their masks per
frame, and expressions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, UInt8

from ans_core.data.scene_text import (
    Expression,
    Query,
    has_attributes,
    phrase,
    several_expression,
    some_attributes,
    unique_query,
    words,
)
from ans_core.data.scenes import (
    FULL,
    SPLITS,
    Thing,
    World,
    background,
    outline,
    random_attributes,
    random_thing,
    render,
)

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MOTIONS = ("still", "straight", "bouncing", "leaving", "entering")
MOTION_WORDS = {
    "still": "that does not move",
    "leaving": "that leaves the picture",
    "entering": "that enters the picture",
}
SEEN = 0.5
"""Every thing shows at least this share of its area in at least two frames."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moving:
    """A thing and its path. `direction` is None if it has no single direction (still, bouncing)."""

    thing: Thing
    motion: str
    direction: str | None
    path: Float[np.ndarray, "F 2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    things: tuple[Moving, ...]
    frames: UInt8[np.ndarray, "F H W 3"]
    masks: Bool[np.ndarray, "N F H W"]


def draw_clip(
    *, seed: int, split: str, index: int, image_size: int, frames: int, world: World = FULL
) -> Clip:
    """Draw a clip that depends on the arguments alone. Draw again if a thing is hardly ever visible, or a
    leaving (entering) thing is visible in the last (first) frame."""
    key = [seed, SPLITS.index(split), index, 7]  # 7: a random stream of its own, unlike those of still scenes
    count = int(np.random.default_rng(key).integers(2, 5))
    attempt = 1
    while True:
        rng = np.random.default_rng([*key, attempt])
        things = tuple(
            _moving(rng, *attributes, frames=frames, world=world)
            for attributes in random_attributes(rng, count, world)
        )
        canvas = background(rng, image_size)
        shots = [
            render(
                tuple(replace(m.thing, x=float(m.path[f, 0]), y=float(m.path[f, 1])) for m in things), canvas
            )
            for f in range(frames)
        ]
        masks = np.stack([shot[1] for shot in shots], 1)  # (N, F, H, W)
        if _well_seen(things, masks):
            return Clip(things=things, frames=np.stack([shot[0] for shot in shots]), masks=masks)
        attempt += 1


def clip_expressions(rng: np.random.Generator, things: Sequence[Moving]) -> list[Expression]:
    """Write three expressions, by motion and by attribute in turn, and one for several things if possible."""
    expressions: list[Expression] = []
    for i in range(3):
        for target in np.roll(rng.permutation(len(things)), -i):
            make = _attribute_expression if i % 2 else _motion_expression
            made = make(rng, things, int(target))
            if made and all(made.text != other.text for other in expressions):
                expressions.append(made)
                break
    several = several_expression(rng, [m.thing for m in things])
    return [*expressions, several] if several and rng.random() < 0.4 else expressions


def _attribute_expression(
    rng: np.random.Generator, things: Sequence[Moving], target: int
) -> Expression | None:
    query = unique_query(
        rng,
        [m.thing for m in things],
        target,
        lambda r, candidates, i: _attributes_of(r, candidates[i], least=1),
    )
    return None if query is None else Expression(text=phrase(query), targets=(target,), kind="attribute")


def _motion_expression(rng: np.random.Generator, things: Sequence[Moving], target: int) -> Expression | None:
    """Write e.g. `the circle moving left`: attributes and motion together mean one thing, and no thing with
    these attributes moves in an unclear direction."""
    mover = things[target]
    for _ in range(8):
        query = _attributes_of(rng, mover.thing, least=0)
        fits = [m for m in things if has_attributes(query, m.thing)]
        if mover.motion in MOTION_WORDS and (mover.direction is None or rng.random() < 0.6):
            same, motion_words = [m for m in fits if m.motion == mover.motion], MOTION_WORDS[mover.motion]
        elif mover.direction is not None and all(m.motion != "bouncing" for m in fits):
            same, motion_words = (
                [m for m in fits if m.direction == mover.direction],
                f"moving {mover.direction}",
            )
        else:
            continue
        if len(same) == 1:
            return Expression(text=f"the {words(query)} {motion_words}", targets=(target,), kind="motion")
    return None


def _attributes_of(rng: np.random.Generator, thing: Thing, *, least: int) -> Query:
    return some_attributes(rng, thing, least=least, most=3, noun_share=0.75)


def _moving(
    rng: np.random.Generator, shape: str, colour: str, size: str, *, frames: int, world: World
) -> Moving:
    thing = random_thing(rng, shape=shape, colour=colour, size=size, world=world)
    motion = str(rng.choice(MOTIONS, p=(0.2, 0.35, 0.15, 0.15, 0.15)))
    low, high = -outline(thing).min(0), 1 - outline(thing).max(0)
    start = rng.uniform(low, high)
    if motion == "still":
        return Moving(thing=thing, motion=motion, direction=None, path=np.repeat(start[None], frames, 0))
    direction = str(rng.choice(list(DIRECTIONS)))
    ahead = np.array(DIRECTIONS[direction], float)
    axis = int(ahead[0] == 0)
    time = np.linspace(0, 1, frames)[:, None]
    if motion == "bouncing":
        way = rng.uniform(0.5, 0.9, 2) * rng.choice((-1, 1), 2)
        span = high - low
        # a triangle wave between the walls
        path = low + span - np.abs((start - low + way * time) % (2 * span) - span)
        return Moving(thing=thing, motion=motion, direction=None, path=path)
    edge = high[axis] if ahead[axis] > 0 else low[axis]
    if motion == "straight":
        length = min(rng.uniform(0.25, 0.6), 0.95 * (high[axis] - low[axis]))
        start[axis] = (
            rng.uniform(low[axis], high[axis] - length)
            if ahead[axis] > 0
            else rng.uniform(low[axis] + length, high[axis])
        )
    else:
        start[axis] = edge - ahead[axis] * rng.uniform(0.15, 0.4)
        length = abs(edge - start[axis]) + 2.2 * thing.radius
    if motion == "entering":
        end = start.copy()
        # the same path mirrored: from the opposite edge inwards
        end[axis] = low[axis] + high[axis] - start[axis]
        path = end - ahead * length * (1 - time)
    else:
        path = start + ahead * length * time
    sideways = rng.uniform(-0.08, 0.08) * time[:, 0]
    path[:, 1 - axis] = np.clip(path[:, 1 - axis] + sideways, low[1 - axis], high[1 - axis])
    return Moving(thing=thing, motion=motion, direction=direction, path=path)


def _well_seen(things: Sequence[Moving], masks: Bool[np.ndarray, "N F H W"]) -> bool:
    areas = masks.sum((2, 3))
    seen = (areas >= SEEN * areas.max(1, keepdims=True)).sum(1)
    gone = all(
        (m.motion != "leaving" or areas[i, -1] == 0) and (m.motion != "entering" or areas[i, 0] == 0)
        for i, m in enumerate(things)
    )
    return bool((areas.max(1) > 0).all() and (seen >= min(2, masks.shape[1])).all() and gone)
