"""Annotated photographs (any data set whose samples have words and masks) -> questions whose answers are
right by construction.

Each family says what it needs and leaves out what is ambiguous: crowds, things that are too small to be seen
in a crop, things cut off by the picture's edge where sizes are compared, and answers near a limit. The
shortest plan of each is a look (`zoom_in`) at every thing that it is about, which is read where text is asked
for, so traces need no model that segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool
from scipy import ndimage

from ans_core.agent import ocr, shapes
from ans_core.agent.operations.base import part_of
from ans_core.agent.protocol import Call, without_tokens
from ans_core.agent.workspace import FIRST, THOUSAND, ImageHandle
from ans_core.agent.world.question import Question, Target
from ans_core.agent.world.things import (
    AnnotatedPicture,
    AnnotatedThing,
    distinct,
    name_of_file,
    stems,
    words_of,
)
from ans_core.data.conversation import BOX_STEP
from ans_core.dist import seed_of
from ans_core.pictures import rle, transforms

MARGIN = 0.04
"""Around a thing in the crop of it, as a share of each side of its box, and .75 of a step at least."""
STEPS = (BOX_STEP, 20, 10, 4, 1)
"""What the numbers of a crop's box are multiples of, in thousandths."""
SHOWN = 0.3
"""Share of the crop that the thing fills, where its shape allows it."""
MOST_COUNTED = 4
"""A look at each is a call, and an episode has four."""
CLEARLY = 1.6
"""How many times as large, as near, or as large as its fellow a thing must be."""
UNIFORM = 0.8
"""Share of a thing's pixels (edge left out) that have its colour's name."""
READS_TEXT = "rapidocr"
"""The reader that knows texts on photographs."""
SURE = 0.85
"""Confidence of a line that is asked about."""
SHORTEST_TEXT = 3
"""Letters and digits."""
NUMBERS = tuple(str(number) for number in range(1, MOST_COUNTED + 1))
THIRDS = ("left", "middle", "right")
PLURALS = {
    "person": "people", "sheep": "sheep", "knife": "knives", "mouse": "mice", "bus": "buses",
    "bench": "benches", "couch": "couches", "sandwich": "sandwiches", "toothbrush": "toothbrushes",
    "wine glass": "wine glasses", "hair brush": "hair brushes",
}  # fmt: skip
PLURAL_ALREADY = ("skis", "scissors")
"""COCO's classes that are no single things by their names."""
PATCHWORK = (
    "person", "pizza", "sandwich", "cake", "book", "tv", "laptop", "potted plant", "zebra", "giraffe", "bed",
    "dining table",
)  # fmt: skip
"""COCO's classes whose one colour nobody would name: clothes, food, screens, patterns, what lies on them."""


PLACES = stems(
    "left right middle center centre central far farther further near nearby side corner next beside close "
    "adjacent alongside"
)
SIZES = stems(
    "large big small tall little tiny tiniest huge short giant gigantic enormous massive wide narrow long mini "
    "miniature thick thin high"
)
COLOURS = stems(
    " ".join(shapes.NAMES)
    + " gray silver gold golden navy reddish bluish greenish yellowish whitish blackish "
    "brownish purplish pinkish greyish grayish"
)
TELLING: dict[str, set[str]] = {
    "which_larger": SIZES,
    "left_or_right": PLACES,
    "nearer": PLACES,
    "which_colour": COLOURS,
    "which_third": PLACES,
}
"""Words in a thing's name, without their endings, that answer the family's question, or nearly: the red cup's
colour."""


def a(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def plural(name: str) -> str:
    return PLURALS.get(name) or name + ("es" if name.endswith(("s", "x", "ch", "sh")) else "s")


# Families


class Draft(NamedTuple):
    """A question about things of one picture, whose plan looks at each of them in turn (or at `looks`)."""

    text: str
    answer: str
    choices: tuple[str, ...]
    things: Sequence[AnnotatedThing]
    looks: Sequence[AnnotatedThing] = ()
    """What the plan looks at, where that is not all things."""
    thoughts: Sequence[str] = ()
    """Before each call; empty = plain ones."""
    then: tuple[Call, ...] = ()
    """What is called after the looks."""


def _count(picture: AnnotatedPicture, rng: np.random.Generator) -> Iterator[Draft]:
    """Needs classes that are annotated in full, without a crowd; all of them clear, and at most four."""
    if not picture.annotated:
        return
    for name, things in picture.things.items():
        if (
            name in picture.crowds
            or name in PLURAL_ALREADY
            or len(things) > MOST_COUNTED
            or picture.may_mean_another(name)
            or not all(thing.clear for thing in things)
        ):
            continue
        thoughts = [
            f"I look for {plural(name)} one by one.",
            *(f"That is number {number}. Is there another?" for number in NUMBERS),
        ]
        text = f"How many {plural(name)} are in the picture?"
        yield Draft(text, str(len(things)), NUMBERS, things, thoughts=thoughts)


def _is_there(picture: AnnotatedPicture, rng: np.random.Generator) -> Iterator[Draft]:
    """Needs a clear thing for `yes`, and for `no` a name of which there is surely none; as many of one as of
    the other, where there are. Either is a look, for `no` at the largest thing, so that the plan tells
    nothing."""
    clear = [thing for things in picture.things.values() for thing in things if thing.clear]
    present = [name for name in picture.things if name not in PLURAL_ALREADY]
    present = [name for name in present if any(thing.clear for thing in picture.things[name])]
    absent = sorted(
        name for name in picture.absent if name not in PLURAL_ALREADY and not picture.may_mean_another(name)
    )
    chosen = [absent[number] for number in rng.permutation(len(absent))[: len(present)]]
    for name, answer in [*((name, "yes") for name in present), *((name, "no") for name in chosen)]:
        shown = [thing for thing in picture.things.get(name, ()) if thing.clear]
        look = max(shown or clear, key=lambda thing: thing.area)
        thought = f"This could be {a(name)}; I look closer."
        yield Draft(f"Is there {a(name)} in the picture?", answer, ("yes", "no"), shown, [look], [thought])


def _which_larger(picture: AnnotatedPicture, rng: np.random.Generator) -> Iterator[Draft]:
    """Needs two single things, whole, one clearly larger in the picture."""
    for one, other in combinations([thing for thing in picture.single() if not thing.cut], 2):
        if max(one.area, other.area) >= CLEARLY * min(one.area, other.area) and distinct(one, other):
            first, second = _shuffled((one, other), rng)
            text = f"Which is larger in the picture, {first.phrase} or {second.phrase}?"
            larger = max(one, other, key=lambda thing: thing.area)
            yield Draft(text, larger.phrase, (first.phrase, second.phrase), (first, second))


def _left_or_right(picture: AnnotatedPicture, rng: np.random.Generator) -> Iterator[Draft]:
    """Needs two single things, side by side without an overlap."""
    for one, other in combinations(picture.single(), 2):
        if one.box[2] <= other.box[0] or other.box[2] <= one.box[0]:
            first, second = _shuffled((one, other), rng)
            text = f"Is {first.phrase} left or right of {second.phrase}?"
            answer = "left" if first.box[2] <= second.box[0] else "right"
            yield Draft(text, answer, ("left", "right"), (first, second))


def _nearer(picture: AnnotatedPicture, rng: np.random.Generator) -> Iterator[Draft]:
    """Needs three single things; distances are those of the boxes' middles in the picture."""
    single = picture.single()
    for start in single:
        for one, other in combinations([thing for thing in single if thing is not start], 2):
            near, far = sorted((one, other), key=lambda thing: _apart(start, thing))
            if _apart(start, far) >= CLEARLY * _apart(start, near) and distinct(start, near, far):
                first, second = _shuffled((one, other), rng)
                text = f"Which is nearer to {start.phrase} in the picture, {first.phrase} or {second.phrase}?"
                yield Draft(text, near.phrase, (first.phrase, second.phrase), (start, first, second))


def _which_colour(picture: AnnotatedPicture, rng: np.random.Generator) -> Iterator[Draft]:
    """Needs a single thing nearly all of whose pixels have one colour's name."""
    pixels = np.asarray(transforms.open_image(picture.frame))
    for thing in picture.single():
        colour = uniform_colour(pixels, rle.decode(thing.mask)) if thing.name not in PATCHWORK else None
        if colour is not None:
            yield Draft(f"What colour is {thing.phrase}?", colour, tuple(shapes.NAMES), [thing])


def _which_third(picture: AnnotatedPicture, rng: np.random.Generator) -> Iterator[Draft]:
    """Needs a single thing that lies within one third of the picture."""
    for thing in picture.single():
        left, right = (3 * edge / picture.width for edge in (thing.box[0], thing.box[2]))
        if int(left) == int(min(right, 2.999)):
            text = f"In which third of the picture is {thing.phrase}, the left, the middle or the right one?"
            yield Draft(text, THIRDS[int(left)], THIRDS, [thing])


def _smaller_of_two(picture: AnnotatedPicture, rng: np.random.Generator) -> Iterator[Draft]:
    """Needs two of a class that is annotated in full, whole, one clearly smaller, side by side without an
    overlap."""
    if not picture.annotated:
        return
    for name, things in picture.things.items():
        complete = (
            len(things) == 2
            and name not in picture.crowds
            and all(thing.clear and not thing.cut for thing in things)
        )
        if not complete or name in PLURAL_ALREADY or picture.may_mean_another(name):
            continue
        small, large = sorted(things, key=lambda thing: thing.area)
        apart = small.box[2] <= large.box[0] or large.box[2] <= small.box[0]
        if apart and large.area >= CLEARLY * small.area:
            text = f"Is the smaller of the two {plural(name)} left or right of the larger one?"
            answer = "left" if small.box[2] <= large.box[0] else "right"
            yield Draft(text, answer, ("left", "right"), (small, large))


def _what_is_written(
    picture: AnnotatedPicture, rng: np.random.Generator, *, reader: str | None
) -> Iterator[Draft]:
    """Needs a single thing with one line of text, which the reader finds sure and the same in the picture and
    in the crop of the thing, and which is shown as it is to be answered (READ_TEXT quotes it)."""
    if reader != READS_TEXT or not (single := picture.single()):
        return
    pixels = transforms.open_image(picture.frame)
    whole = ImageHandle(frame=0, box=(0, 0, *pixels.size))
    lines = [line for line in ocr.read_lines(pixels, by=reader) if line.confidence >= SURE]
    for thing in single:
        x1, y1, x2, y2 = thing.box
        on_it = [
            line.text
            for line in lines
            if x1 <= (line.box[0] + line.box[2]) / 2 <= x2 and y1 <= (line.box[1] + line.box[3]) / 2 <= y2
        ]
        if len(on_it) != 1 or sum(map(str.isalnum, on_it[0])) < SHORTEST_TEXT:
            continue
        if without_tokens(repr(on_it[0])[1:-1]) != on_it[0]:
            continue
        shown = part_of(whole, FIRST, zoom(picture, thing).arguments["bbox_2d"], smallest=1)
        again = ocr.read_lines(pixels.crop(shown.box), by=reader)
        if [line.text for line in again if line.confidence >= SURE] == on_it and len(again) == 1:
            text = f"What is written on {thing.phrase}?"
            thoughts = [f"I look at {thing.phrase}.", f"That is {thing.phrase}; I read it."]
            read = Call(name="read_text", arguments={"image": "image_2"})
            yield Draft(text, on_it[0], (), [thing], thoughts=thoughts, then=(read,))


ASKING: dict[str, Callable[[AnnotatedPicture, np.random.Generator], Iterator[Draft]]] = {
    "count": _count,
    "is_there": _is_there,
    "which_larger": _which_larger,
    "left_or_right": _left_or_right,
    "nearer": _nearer,
    "which_colour": _which_colour,
    "which_third": _which_third,
    "smaller_of_two": _smaller_of_two,
}
TELLING_PLANS = ("count",)
"""Families whose shortest plan has as many calls as the answer says."""
WHAT_IS_WRITTEN = "what_is_written"
"""The family that needs a reader."""
FAMILIES_OF_PHOTOGRAPHS = (*ASKING, WHAT_IS_WRITTEN)


def questions(
    annotated_pictures: Sequence[AnnotatedPicture],
    *,
    families: Sequence[str] = FAMILIES_OF_PHOTOGRAPHS,
    seed: int,
    reader: str | None = None,
) -> list[Question]:
    """Return every question that these families can ask about the pictures, without the pictures, in the order
    of pictures and families. `seed`: decides the order in which things are named and which absent thing is
    asked about. `reader`: of text (READS_TEXT; half a second a picture); others know none on photographs."""
    asking = ASKING | {WHAT_IS_WRITTEN: partial(_what_is_written, reader=reader)}
    asked = []
    for picture in annotated_pictures:
        picture_id = "/".join(name_of_file(part) for part in picture.picture_id.split("/"))
        for family in families:
            rng = np.random.default_rng(seed_of(seed, "annotated question", family, picture.picture_id))
            asked += [
                _question(picture, draft, family, f"{family}/{picture_id}/{number}")
                for number, draft in enumerate(asking[family](picture, rng))
                if not any(_tells(thing.name, family) for thing in draft.things)
            ]
    return asked


def _tells(name: str, family: str) -> bool:
    return not TELLING.get(family, set()).isdisjoint(stems(name))


def uniform_colour(pixels: np.ndarray, mask: Bool[np.ndarray, "H W"]) -> str | None:
    """Return the colour's name that UNIFORM of the pixels inside have (edge of two pixels left out); None
    without one, and for grey, which white in the shade is, too."""
    inner = ndimage.binary_erosion(mask, iterations=2)
    if not inner.any():
        return None
    nearest = shapes.nearest_names(shapes.lab(pixels[inner]))
    share = np.bincount(nearest) / len(nearest)
    name = list(shapes.NAMES)[int(share.argmax())]
    return name if share.max() >= UNIFORM and name != "grey" else None


def _apart(one: AnnotatedThing, other: AnnotatedThing) -> float:
    return float(np.hypot(one.middle[0] - other.middle[0], one.middle[1] - other.middle[1]))


def _shuffled(
    things: tuple[AnnotatedThing, AnnotatedThing], rng: np.random.Generator
) -> tuple[AnnotatedThing, AnnotatedThing]:
    first, second = things if rng.random() < 0.5 else things[::-1]
    return first, second


def _question(picture: AnnotatedPicture, draft: Draft, family: str, question_id: str) -> Question:
    things = draft.things
    names = [thing.phrase for thing in things]
    plain = [f"I look at {name}." for name in names[:1]]
    plain += [f"That was {one}; now I look at {other}." for one, other in pairwise(names)]
    plan = (*(zoom(picture, thing) for thing in draft.looks or things), *draft.then)
    # A self-correction says of what it looked at first that it is not what was asked about, so that must be
    # neither in the question nor of a name in it, or of one with all words of such a name.
    target_words = [set(words_of(name)) for name in {thing.name for thing in things}]
    candidates = [
        thing
        for name, same_name in picture.things.items()
        if not any(words <= set(words_of(name)) for words in target_words)
        for thing in same_name
        if thing.clear
    ]
    others = [other for other in candidates if all(distinct(other, thing) for thing in things)]
    distraction = (zoom(picture, max(others, key=lambda thing: thing.area)),) if others and things else ()
    return Question(
        question_id=question_id,
        family=family,
        text=draft.text,
        answer=draft.answer,
        choices=draft.choices,
        targets=tuple(Target(phrase=thing.phrase, masks=(thing.mask,)) for thing in things),
        plan=plan,
        any_target=family == "is_there",
        distraction=distraction,
        thoughts=tuple((draft.thoughts or plain)[: len(plan)]),
    )


def zoom(picture: AnnotatedPicture, thing: AnnotatedThing) -> Call:
    """On a thing and a margin around it, inside the picture: in the coarsest numbers (STEPS) with which the
    thing still fills SHOWN of the crop, so that a box that is one step off shows it, too."""
    sides = (picture.width, picture.height) * 2
    x1, y1, x2, y2 = (THOUSAND * edge / side for edge, side in zip(thing.box, sides, strict=True))
    box = np.zeros(4)
    for step in STEPS:
        across, down = (max(MARGIN * length, 0.75 * step) for length in (x2 - x1, y2 - y1))
        low = np.floor(np.array([x1 - across, y1 - down]) / step)
        high = np.ceil(np.array([x2 + across, y2 + down]) / step)
        box = np.clip(np.concatenate([low, high]) * step, 0, THOUSAND)
        crop = (box[2] - box[0]) * (box[3] - box[1]) / THOUSAND**2 * picture.width * picture.height
        if thing.area >= SHOWN * crop:
            break
    return Call(name="zoom_in", arguments={"bbox_2d": [int(v) for v in box]})
