"""Draw (seed, split, index) -> a scene of the embedded world: things with attributes and places, its picture,
and exact masks of the visible parts.

Coordinates are shares of the picture's side: x to the right, y down, (0, 0) the top left corner.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw

from ans_core.pictures.colours import COLOURS

SPLITS = ("train", "val", "test")
SHAPES = ("circle", "square", "triangle", "star", "cross")
SIZES = {"small": (0.036, 0.044), "large": (0.084, 0.104)}
"""Range of a circle's area as a share of the picture; other shapes are a little smaller (AREA_FACTOR)."""
TEXTURES = {"plain": 0.5, "striped": 0.28, "dotted": 0.22}


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What things can be."""

    shapes: tuple[str, ...]
    colours: tuple[str, ...]
    textures: dict[str, float]
    """Texture -> its share."""


WORLDS = {
    "full": World(shapes=SHAPES, colours=tuple(COLOURS), textures=TEXTURES),
    "small": World(
        shapes=("circle", "triangle", "cross"),
        colours=("red", "green", "blue", "yellow"),
        textures={"plain": 1.0},
    ),
}
"""small: a fifth of the words, which a model learns in minutes."""
FULL = WORLDS["full"]
AREA_FACTOR = {"circle": 1.0, "square": 1.0, "triangle": 0.9, "star": 0.85, "cross": 0.9}
"""Pointed shapes reach further for the same area; a smaller area keeps them inside the picture."""
THIRDS = (1 / 3, 2 / 3)
CLEAR = 0.03
"""Smallest distance of a thing's centre to a line between thirds, so that place words are never
borderline."""
VISIBLE = 0.7
"""Smallest visible share of each thing's area."""
SUPERSAMPLE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """One object. `radius` is that of the circumscribed circle."""

    shape: str
    colour: str
    size: str
    texture: str
    x: float
    y: float
    radius: float
    angle: float
    rgb: tuple[int, int, int]
    stripe_angle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Things from back to front, the picture, and the visible pixels of each thing."""

    things: tuple[Thing, ...]
    image: UInt8[np.ndarray, "H W 3"]
    masks: Bool[np.ndarray, "N H W"]


def draw_scene(*, seed: int, split: str, index: int, image_size: int, world: World = FULL) -> Scene:
    """Draw a scene that depends on the arguments alone. Layouts that hide more than 1 - VISIBLE of a thing
    are drawn again."""
    key = [seed, SPLITS.index(split), index]
    count = int(np.random.default_rng(key).integers(2, 7))
    attempt = 1
    while True:
        rng = np.random.default_rng([*key, attempt])
        things = _layout(rng, count, world)
        if things is not None:
            image, masks, full = render(things, background(rng, image_size))
            if (masks.sum((1, 2)) >= VISIBLE * full).all():
                return Scene(things=things, image=image, masks=masks)
        attempt += 1


def random_thing(
    rng: np.random.Generator, *, shape: str, colour: str, size: str, world: World = FULL
) -> Thing:
    """Draw a thing with these attributes and everything else random; it stays at the top left corner until it
    gets a place."""
    area = rng.uniform(*SIZES[size]) * AREA_FACTOR[shape]
    red, green, blue = np.clip(np.array(COLOURS[colour]) + rng.integers(-12, 13, 3), 0, 255).tolist()
    return Thing(
        shape=shape,
        colour=colour,
        size=size,
        texture=str(rng.choice(list(world.textures), p=list(world.textures.values()))),
        x=0.0,
        y=0.0,
        radius=float(np.sqrt(area / _polygon_area(shape))),
        angle=float(rng.uniform(-0.17, 0.17)),
        rgb=(red, green, blue),
        stripe_angle=float(rng.uniform(0, np.pi)),
    )


def outline(thing: Thing) -> Float[np.ndarray, "P 2"]:
    """Return corners around the thing's own centre, in shares of the picture's side."""
    turn = np.array([[np.cos(thing.angle), -np.sin(thing.angle)], [np.sin(thing.angle), np.cos(thing.angle)]])
    return _polygon(thing.shape) @ turn.T * thing.radius


def random_attributes(
    rng: np.random.Generator, count: int, world: World = FULL
) -> list[tuple[str, str, str]]:
    """Draw (shape, colour, size) of `count` things. A new thing often shares its colour or shape with an
    earlier one: a distractor."""
    attributes: list[tuple[str, str, str]] = []
    large = 0
    for i in range(count):
        shape, colour = str(rng.choice(world.shapes)), str(rng.choice(world.colours))
        if i and rng.random() < 0.45:
            other = attributes[rng.integers(i)]
            shape, colour = (other[0], colour) if rng.random() < 0.5 else (shape, other[1])
        size = "large" if rng.random() < 0.65 and large < (4 if count < 6 else 3) else "small"
        large += size == "large"
        attributes.append((shape, colour, size))
    return attributes


def background(rng: np.random.Generator, image_size: int) -> UInt8[np.ndarray, "H W 3"]:
    """Draw a muted texture: a gradient between two greyish colours plus cloudy noise, never as bright or
    saturated as a thing."""
    side = np.linspace(0, 1, image_size, dtype=np.float32)
    direction = rng.uniform(0, 2 * np.pi)
    ramp = side[None, :] * np.cos(direction) + side[:, None] * np.sin(direction)
    ramp = (ramp - ramp.min()) / (ramp.max() - ramp.min())
    grey = rng.uniform(55, 135, 2)
    ends = grey[:, None] + rng.uniform(-14, 14, (2, 3))
    picture = ends[0] + ramp[..., None] * (ends[1] - ends[0])  # (H, W, 3)
    for cells in (6, 24):
        noise = Image.fromarray(rng.normal(0, rng.uniform(3, 9), (cells, cells)).astype(np.float32))
        picture += np.asarray(noise.resize((image_size, image_size), Image.Resampling.BICUBIC))[..., None]
    return np.clip(picture, 20, 180).astype(np.uint8)


def render(
    things: tuple[Thing, ...], canvas: UInt8[np.ndarray, "H W 3"]
) -> tuple[UInt8[np.ndarray, "H W 3"], Bool[np.ndarray, "N H W"], Float[np.ndarray, " N"]]:
    """Paint things back to front; return the picture, visible pixels per thing, and how many pixels each
    would have alone inside the picture."""
    size = len(canvas)
    image = canvas.astype(np.float32)
    owner = np.full((size, size), -1, np.int8)
    full = np.zeros(len(things))
    for i, thing in enumerate(things):
        corners = (outline(thing) + np.array([thing.x, thing.y])) * size
        x0, y0 = np.clip(np.floor(corners.min(0)), 0, size).astype(int).tolist()
        x1, y1 = np.clip(np.ceil(corners.max(0)), 0, size).astype(int).tolist()
        if x0 >= x1 or y0 >= y1:
            continue  # outside of the picture (clips)
        fine = Image.new("L", ((x1 - x0) * SUPERSAMPLE, (y1 - y0) * SUPERSAMPLE))
        points = ((corners - (x0, y0)) * SUPERSAMPLE).ravel().tolist()
        ImageDraw.Draw(fine).polygon(points, fill=255)
        coverage = np.asarray(fine.reduce(SUPERSAMPLE), np.float32) / 255
        inside = coverage >= 0.5
        full[i] = inside.sum()
        owner[y0:y1, x0:x1][inside] = i
        patch = image[y0:y1, x0:x1]
        patch += coverage[..., None] * (_paint(thing, size, (x0, y0, x1, y1)) - patch)
    masks = owner[None] == np.arange(len(things), dtype=np.int8)[:, None, None]
    return image.round().astype(np.uint8), masks, full


def _layout(rng: np.random.Generator, count: int, world: World) -> tuple[Thing, ...] | None:
    """Draw things with places; None if they found no room."""
    placed: list[Thing] = []
    for shape, colour, size in random_attributes(rng, count, world):
        thing = random_thing(rng, shape=shape, colour=colour, size=size, world=world)
        low, high = -outline(thing).min(0) + 0.01, 1 - outline(thing).max(0) - 0.01
        for _ in range(60):
            x, y = (float(v) for v in rng.uniform(low, high))
            near_line = min(abs(v - line) for v in (x, y) for line in THIRDS) < CLEAR
            if not near_line and all(np.hypot(x - o.x, y - o.y) > _reach(thing) + _reach(o) for o in placed):
                placed.append(dataclasses.replace(thing, x=x, y=y))
                break
        else:
            return None
    return tuple(placed)


def _reach(thing: Thing) -> float:
    """Return a little more than the radius of the circle of the same area: neighbours may touch, but seldom
    cover each other."""
    return 1.12 * thing.radius * float(np.sqrt(_polygon_area(thing.shape) / np.pi))


def _paint(thing: Thing, size: int, box: tuple[int, int, int, int]) -> Float[np.ndarray, "h w 3"]:
    """Return the thing's colour over its box; stripes and dots are a dark version of it, fixed to the thing
    (they move with it)."""
    x0, y0, x1, y1 = box
    rgb = np.array(thing.rgb, np.float32)
    if thing.texture == "plain":
        return np.broadcast_to(rgb, (y1 - y0, x1 - x0, 3))
    x = (np.arange(x0, x1, dtype=np.float32) + 0.5) / size - thing.x
    y = (np.arange(y0, y1, dtype=np.float32) + 0.5) / size - thing.y
    along, across = np.cos(thing.stripe_angle), np.sin(thing.stripe_angle)
    if thing.texture == "striped":
        wave = np.sin((x[None, :] * along + y[:, None] * across) * (2 * np.pi / 0.07))
        dark = np.clip(wave * 2.5, -1, 1) / 2 + 0.5
    else:
        period = 0.075
        u = (x[None, :] + period / 2) % period - period / 2
        v = (y[:, None] + period / 2) % period - period / 2
        dark = np.clip((0.024 - np.hypot(u, v)) * 128 + 0.5, 0, 1)
    return rgb * (1 - 0.6 * dark[..., None])


@cache
def _polygon(shape: str) -> Float[np.ndarray, "P 2"]:
    """Return corners on or in the unit circle, centred, y down."""
    if shape == "square":
        return _on_circle(4, start=np.pi / 4)
    if shape == "triangle":
        return _on_circle(3, start=-np.pi / 2)
    if shape == "star":
        return _on_circle(10, start=-np.pi / 2) * np.where(np.arange(10) % 2, 0.45, 1.0)[:, None]
    if shape == "cross":
        a, b = 0.3, 0.95  # half an arm's width, its length: a² + b² = 1
        return np.array(
            [
                (-a, -b),
                (a, -b),
                (a, -a),
                (b, -a),
                (b, a),
                (a, a),
                (a, b),
                (-a, b),
                (-a, a),
                (-b, a),
                (-b, -a),
                (-a, -a),
            ]
        )
    assert shape == "circle", shape
    return _on_circle(48, start=0.0)


def _on_circle(corners: int, *, start: float) -> Float[np.ndarray, "P 2"]:
    angles = start + 2 * np.pi * np.arange(corners) / corners
    return np.stack([np.cos(angles), np.sin(angles)], 1)


@cache
def _polygon_area(shape: str) -> float:
    x, y = _polygon(shape).T
    return float(abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2)
