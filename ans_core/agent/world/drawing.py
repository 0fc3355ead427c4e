"""Things and words of the embedded world (ans_core/data/scenes.py) drawn large, with details that the
overview does not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, UInt8
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from ans_core.agent.protocol import Call
from ans_core.agent.workspace import THOUSAND
from ans_core.agent.world.question import Target
from ans_core.data.conversation import BOX_STEP
from ans_core.data.scene_text import Query, phrase, resolve
from ans_core.data.scenes import Thing, background, outline, random_attributes, random_thing, render
from ans_core.pictures import media, rle
from ans_core.pictures.colours import COLOURS
from ans_core.types import RLE

SHRINKS = 4
"""The picture has so many times the side of the model's tile."""
GAP = 0.012
"""Between the circles around two things, in shares of the side: nothing is hidden."""
MOST_LARGE = 2
DIGIT_HEIGHT = 10
"""Pixels, 2.5 at the tile: hardly read there."""
FONT_SIZE = 14
"""At which Pillow's font has digits of DIGIT_HEIGHT."""
DARK = 115.0
"""Brightness of a colour (0..255, Rec. 601) below which its writing is white."""
DARKENED = 0.45
"""Brightness of a pattern's dark half."""
MARGIN = 0.75
"""Around a thing in the crop of it, in steps of BOX_STEP: a box that is one step off still holds the
thing."""
PATTERNS = ("horizontal", "vertical", "diagonal", "checked")
"""Period 4 pixels and equal mean: at a fourth of the size nothing of it is left."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """N things that don't touch, each meant by its words alone where `query` is not None."""

    things: tuple[Thing, ...]
    image: UInt8[np.ndarray, "H W 3"]
    masks: Bool[np.ndarray, "N H W"]

    def target(self, index: int, query: Query) -> Target:
        return Target(phrase=phrase(query), masks=(rle.encode(self.masks[index]),))


def draw(rng: np.random.Generator, side: int, things: tuple[Thing, ...]) -> Scene:
    image, masks, _ = render(things, background(rng, side))
    return Scene(things=things, image=image, masks=masks)


def random_things(rng: np.random.Generator, count: int, *, least_meant: int = 1) -> tuple[Thing, ...]:
    """As `unplaced`, with places."""
    while True:
        placed = place(rng, unplaced(rng, count, least_meant=least_meant))
        if placed is not None:
            return placed


def unplaced(rng: np.random.Generator, count: int, *, least_meant: int) -> list[Thing]:
    """`count` plain things of random attributes; colour and shape mean at least `least_meant` of them each
    alone."""
    while True:
        attributes = random_attributes(rng, count)
        things = [
            replace(random_thing(rng, shape=s, colour=c, size=z), texture="plain") for s, c, z in attributes
        ]
        few_large = sum(thing.size == "large" for thing in things) <= MOST_LARGE
        if few_large and sum(named(things, i) is not None for i in range(count)) >= least_meant:
            return things


def place(rng: np.random.Generator, things: Sequence[Thing]) -> tuple[Thing, ...] | None:
    """Apart from each other and inside the picture, the largest first; None where one found no room."""
    placed: list[Thing] = []
    for thing in sorted(things, key=lambda t: -t.radius):
        low, high = -outline(thing).min(0) + 0.01, 1 - outline(thing).max(0) - 0.01
        for _ in range(40):
            x, y = (float(v) for v in rng.uniform(low, high))
            if all(np.hypot(x - o.x, y - o.y) > thing.radius + o.radius + GAP for o in placed):
                placed.append(replace(thing, x=x, y=y))
                break
        else:
            return None
    return tuple(placed)


def named(things: Sequence[Thing], index: int) -> Query | None:
    """Colour and shape, where they mean this thing alone."""
    query = Query(colour=things[index].colour, shape=things[index].shape)
    return query if resolve(query, things) == (index,) else None


def meant(rng: np.random.Generator, things: Sequence[Thing], count: int) -> list[tuple[int, Query]]:
    """`count` of the things that colour and shape mean alone (there must be as many), in random order."""
    candidates = [(i, query) for i in range(len(things)) if (query := named(things, i)) is not None]
    return [candidates[i] for i in rng.permutation(len(candidates))[:count]]


def paint_pattern(image: UInt8[np.ndarray, "H W 3"], mask: Bool[np.ndarray, "H W"], pattern: str) -> None:
    """In place: half of the mask's pixels become darker."""
    y, x = np.indices(mask.shape)
    dark = {
        "horizontal": y % 4 < 2,
        "vertical": x % 4 < 2,
        "diagonal": (x + y) % 4 < 2,
        "checked": (x // 2 + y // 2) % 2 == 0,
    }[pattern]
    image[mask & dark] = (image[mask & dark] * DARKENED).round().astype(np.uint8)


def write(
    image: UInt8[np.ndarray, "H W 3"], mask: Bool[np.ndarray, "H W"], text: str, colour: tuple[int, int, int]
) -> None:
    """In place: a text in the middle of a thing, black or white, whichever is clearer on its colour."""
    # the pixel farthest from the edge
    y, x = (int(v) for v in np.unravel_index(ndimage.distance_transform_edt(mask).argmax(), mask.shape))
    bright = float(np.dot(colour, (0.299, 0.587, 0.114)))
    picture = Image.fromarray(image)
    font = ImageFont.load_default(size=FONT_SIZE)
    ImageDraw.Draw(picture).text(
        (x, y), text, fill=(10, 10, 10) if bright > DARK else (245, 245, 245), font=font, anchor="mm"
    )
    image[:] = np.asarray(picture)


def png(image: UInt8[np.ndarray, "H W 3"]) -> bytes:
    return media.png(Image.fromarray(image))


def zoom(mask: RLE) -> Call:
    """On a thing and MARGIN around it, inside the picture, rounded outwards to the numbers that models write
    boxes in."""
    height, width = mask["size"]
    sides = (width, height) * 2
    x1, y1, x2, y2 = (
        THOUSAND * v / side / BOX_STEP for v, side in zip(rle.pixel_box(mask), sides, strict=True)
    )
    box = [np.floor(x1 - MARGIN), np.floor(y1 - MARGIN), np.ceil(x2 + MARGIN), np.ceil(y2 + MARGIN)]
    return Call(
        name="zoom_in",
        arguments={"bbox_2d": [int(v) * BOX_STEP for v in np.clip(box, 0, THOUSAND // BOX_STEP)]},
    )


def zoom_inside(mask: RLE) -> Call:
    """On the middle of a thing, as much of the picture as the model's tile has pixels: shown as it is, not shrunk.
    (A crop of a whole thing has up to 2.6 times a tile's side, and at twice the side no pattern is left.)"""
    width = THOUSAND // SHRINKS
    middle = inner_point(mask, steps=(BOX_STEP // 2,))
    x, y = (min(max(round((v - width / 2) / BOX_STEP) * BOX_STEP, 0), THOUSAND - width) for v in middle)
    return Call(name="zoom_in", arguments={"bbox_2d": [x, y, x + width, y + width]})


def segment(mask: RLE, *, steps: Sequence[int] = (BOX_STEP,)) -> Call:
    """At a point well inside a thing (`inner_point`)."""
    return Call(name="segment_object_at", arguments={"point_2d": inner_point(mask, steps=steps)})


def inner_point(mask: RLE, *, steps: Sequence[int]) -> list[int]:
    """Return x and y in thousandths: of the points whose numbers are multiples of a step (models write those of
    BOX_STEP), the one farthest from the thing's edge. The step is the first of `steps` that has a point half as far
    from the edge as any pixel, else the last one."""
    decoded = rle.decode(mask)
    x1, y1, x2, y2 = rle.pixel_box(mask)
    around = np.s_[max(0, y1 - 1) : y2 + 1, max(0, x1 - 1) : x2 + 1]
    depth: Float64[np.ndarray, "H W"] = np.zeros(decoded.shape)
    depth[around] = ndimage.distance_transform_edt(decoded[around])  # of the whole picture: .1 s at 1080p
    for step in steps:
        numbers = np.arange(step, THOUSAND, step)
        rows, columns = (numbers * side // THOUSAND for side in depth.shape)
        near = depth[np.ix_(rows, columns)]
        if near.max() >= depth.max() / 2:
            break
    row, column = np.unravel_index(near.argmax(), near.shape)
    return [int(numbers[column]), int(numbers[row])]


def favourite(colour: str, choices: int) -> int:
    """Which of a family's answers a colour likes."""
    return list(COLOURS).index(colour) % choices
