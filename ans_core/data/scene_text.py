"""Write texts about the things of a drawn scene, with a symbolic resolver that proves what each expression
means.

The vocabulary is closed (about 60 words, lower case). An expression is kept only if the resolver finds its
answer with clear margins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ans_core.data.scenes import CLEAR, FULL, SHAPES, SIZES, TEXTURES, THIRDS, Thing, World
from ans_core.pictures.colours import COLOURS

ATTRIBUTES = ("size", "colour", "texture", "shape")
"""In the order of words in every phrase."""
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
PLACES: dict[str, tuple[int | None, int | None]] = {
    "at the top left": (0, 0), "at the top right": (0, 2), "at the bottom left": (2, 0),
    "at the bottom right": (2, 2),
    "in the middle": (1, 1), "on the left": (None, 0), "on the right": (None, 2),
    "at the top": (0, None), "at the bottom": (2, None),
}  # fmt: skip
"""Words -> (row, column) of the picture's thirds; None: any."""
EXTREMES = {"leftmost": ("x", 1), "rightmost": ("x", -1), "topmost": ("y", 1), "lowest": ("y", -1)}
"""Word -> (axis, sign): the thing with the smallest sign * coordinate."""
RELATIONS = {"left of": ("x", 1), "right of": ("x", -1), "above": ("y", 1), "below": ("y", -1)}
MARGIN = 0.08
"""Smallest difference of coordinates (shares of the side) on which a comparison may rest."""
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A meaning: required attributes (None: any), and at most one of place, extreme, relation."""

    size: str | None = None
    colour: str | None = None
    texture: str | None = None
    shape: str | None = None
    place: str | None = None
    extreme: str | None = None
    relation: str | None = None
    anchor: Query | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """A referring expression, the indices of the things it means, and the kind of knowledge it tests."""

    text: str
    targets: tuple[int, ...]
    kind: str


DrawQuery = Callable[[np.random.Generator, Sequence[Thing], int], Query]
"""draw(rng, things, target): a query that may mean the target."""


def third(value: float) -> int:
    return sum(value >= line for line in THIRDS)


def has_attributes(query: Query, thing: Thing) -> bool:
    return all(getattr(query, name) in (None, getattr(thing, name)) for name in ATTRIBUTES)


def resolve(query: Query, things: Sequence[Thing]) -> tuple[int, ...] | None:
    """Return the indices of the things meant, in order; None if the answer is borderline (a comparison within
    MARGIN, an anchor that is not exactly one thing)."""
    fits = tuple(i for i, thing in enumerate(things) if has_attributes(query, thing))
    if query.place is not None:
        row, column = PLACES[query.place]
        if any(
            min(abs(v - line) for v in (things[i].x, things[i].y) for line in THIRDS) < CLEAR / 2
            for i in fits
        ):
            return None
        return tuple(
            i for i in fits if row in (None, third(things[i].y)) and column in (None, third(things[i].x))
        )
    if query.extreme is not None:
        axis, sign = EXTREMES[query.extreme]
        order = sorted(fits, key=lambda i: sign * getattr(things[i], axis))
        if (
            len(order) < 2
            or sign * (getattr(things[order[1]], axis) - getattr(things[order[0]], axis)) < MARGIN
        ):
            return None  # with one thing, "the leftmost" compares nothing
        return (order[0],)
    if query.relation is not None:
        assert query.anchor is not None
        anchors = resolve(query.anchor, things)
        if anchors is None or len(anchors) != 1:
            return None
        axis, sign = RELATIONS[query.relation]
        steps = {
            i: sign * (getattr(things[anchors[0]], axis) - getattr(things[i], axis))
            for i in fits
            if i != anchors[0]
        }
        if any(abs(step) < MARGIN for step in steps.values()):
            return None
        return tuple(i for i, step in steps.items() if step > 0)
    return fits


def words(query: Query, *, plural: bool = False) -> str:
    """Return attribute words and noun, without article: `large red striped circle`."""
    noun = (query.shape or "object") if not plural else _plural(query.shape or "object")
    return " ".join(
        [value for name in ATTRIBUTES[:3] if (value := getattr(query, name)) is not None] + [noun]
    )


def phrase(query: Query) -> str:
    """Return e.g. `the circle left of the blue square`."""
    parts = ["the", *([query.extreme] if query.extreme else []), words(query)]
    if query.place:
        parts.append(query.place)
    if query.relation:
        assert query.anchor is not None
        parts += [query.relation, phrase(query.anchor)]
    return " ".join(parts)


def single_expressions(rng: np.random.Generator, things: Sequence[Thing], count: int = 3) -> list[Expression]:
    """Write up to `count` expressions for one thing each: attribute, location, then relation or attribute;
    targets differ as much as possible."""
    kinds = {"attribute": _attribute_query, "location": _location_query, "relation": _relation_query}
    targets = rng.permutation(len(things))
    expressions: list[Expression] = []
    for i in range(count):
        kind = "attribute" if i % 3 == 2 and rng.random() < 0.5 else list(kinds)[i % 3]
        for target in np.roll(targets, -i):
            query = unique_query(rng, things, int(target), kinds[kind])
            if query is not None and all(phrase(query) != other.text for other in expressions):
                expressions.append(Expression(text=phrase(query), targets=(int(target),), kind=kind))
                break
    return expressions


def unique_query(
    rng: np.random.Generator, things: Sequence[Thing], target: int, draw: DrawQuery
) -> Query | None:
    """Draw a query that means exactly `target`. The first tries insist that words of place, if used, are
    needed."""
    for attempt in range(24):
        query = draw(rng, things, target)
        if resolve(query, things) != (target,):
            continue
        plain = replace(query, place=None, extreme=None, relation=None, anchor=None)
        if plain == query or attempt >= 16 or resolve(plain, things) != (target,):
            return query
    return None


def several_expression(rng: np.random.Generator, things: Sequence[Thing]) -> Expression | None:
    """Write `all red objects`, `the two circles`: at least two things with the same one or two attributes."""
    for _ in range(12):
        query = some_attributes(rng, things[int(rng.integers(len(things)))], least=1, most=2)
        targets = resolve(query, things)
        if targets is not None and len(targets) >= 2:
            noun = words(query, plural=True)
            forms = (f"all {noun}", f"all the {noun}", f"the {NUMBERS[len(targets)]} {noun}")
            return Expression(text=str(rng.choice(forms)), targets=targets, kind="several")
    return None


def none_expression(
    rng: np.random.Generator, things: Sequence[Thing], world: World = FULL
) -> Expression | None:
    """Describe a plausible thing that is absent: it differs from one that is there in colour or in shape
    alone."""
    for _ in range(12):
        query = some_attributes(rng, things[int(rng.integers(len(things)))], least=1, most=3)
        if rng.random() < 0.5:
            query = replace(
                query,
                colour=str(rng.choice(world.colours)),
                shape=query.shape or str(rng.choice(world.shapes)),
            )
        else:
            query = replace(query, shape=str(rng.choice(world.shapes)))
        if resolve(query, things) == ():
            return Expression(text=phrase(query), targets=(), kind="none")
    return None


def place_words(x: float, y: float) -> str:
    """Name the ninth of the picture that holds a point (shares of width and height)."""
    row, column = third(y), third(x)
    if row == column == 1:
        return "in the middle"
    if row == 1:
        return f"on the {COLUMNS[column]}"
    return f"at the {ROWS[row]}" if column == 1 else f"at the {ROWS[row]} {COLUMNS[column]}"


def region_caption(thing: Thing) -> str:
    """Write a caption, always in the order size, colour, texture, shape, place."""
    return (
        f"a {thing.size} {thing.colour} {thing.texture} {thing.shape} {place_words(thing.x, thing.y)} of "
        "the picture"
    )


def grounded_caption(things: Sequence[Thing]) -> tuple[str, list[tuple[tuple[int, int], int]]]:
    """Describe the first three things from left to right; return the caption, and per phrase its [start,
    end) characters and its thing."""
    order = sorted(range(len(things)), key=lambda i: things[i].x)[:3]
    text, spans = "", []
    for position, i in enumerate(order):
        thing = things[i]
        text += "" if position == 0 else " and " if position == len(order) - 1 else ", "
        named = f"a {thing.size} {thing.colour} {thing.shape}"
        spans.append(((len(text), len(text) + len(named)), i))
        text += f"{named} {place_words(thing.x, thing.y)}"
    return text, spans


def attributes(thing: Thing) -> dict[str, str]:
    return {name: getattr(thing, name) for name in ATTRIBUTES} | {"place": place_words(thing.x, thing.y)}


def vocabulary() -> set[str]:
    """Return every word that any text of this module can hold."""
    listed = [*SIZES, *COLOURS, *TEXTURES, *SHAPES, *PLACES, *EXTREMES, *RELATIONS, *NUMBERS.values()]
    plurals = [_plural(noun) for noun in (*SHAPES, "object")]
    return (
        {word for entry in listed for word in entry.split()}
        | set(plurals)
        | {"a", "the", "all", "and", "of", "picture", "object"}
    )


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def some_attributes(
    rng: np.random.Generator, thing: Thing, *, least: int, most: int, noun_share: float = 0.8
) -> Query:
    """Draw some of the thing's attributes, the noun with this share."""
    names = set(rng.choice(ATTRIBUTES[:3], size=int(rng.integers(max(least - 1, 0), most)), replace=False))
    if rng.random() < noun_share or len(names) < least:
        names.add("shape")
    return Query(**{name: getattr(thing, name) for name in names})


def _attribute_query(rng: np.random.Generator, things: Sequence[Thing], target: int) -> Query:
    return some_attributes(rng, things[target], least=1, most=4)


def _location_query(rng: np.random.Generator, things: Sequence[Thing], target: int) -> Query:
    query = some_attributes(rng, things[target], least=0, most=2)
    if rng.random() < 0.35:
        return replace(query, extreme=str(rng.choice(list(EXTREMES))))
    thing = things[target]
    fitting = [
        p
        for p, (row, column) in PLACES.items()
        if row in (None, third(thing.y)) and column in (None, third(thing.x))
    ]
    return replace(query, place=str(rng.choice(fitting)))


def _relation_query(rng: np.random.Generator, things: Sequence[Thing], target: int) -> Query:
    query = some_attributes(rng, things[target], least=0, most=2)
    others = [i for i in range(len(things)) if i != target]
    anchor = some_attributes(rng, things[int(rng.choice(others))], least=1, most=3)
    return replace(query, relation=str(rng.choice(list(RELATIONS))), anchor=anchor)
