"""Annotated pictures: the things that a data set's samples name and mark, by picture."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ans_core.agent.workspace import Box
from ans_core.pictures import rle
from ans_core.types import RLE, FilePart, ImageRef, Sample, VideoFrame

LONGEST_NAME = 200
"""Characters of a thing's words."""
LONGEST_FILE = 200
"""Bytes of a name in a path; file systems take 255."""
SMALLEST_SIDE = 28
"""Pixels of a thing's box on each side: less can't be zoomed on by a large model, and people see little in
it."""
SMALLEST_AREA = 0.004
"""Share of the picture."""
SAME_IOU = 0.5
"""Two things whose masks have more than this in common are taken for one thing of two names: `the dog`, `the
brown animal`."""
ENDINGS = ("wards", "ward", "bound", "most", "hand", "side", "ing", "est", "ed", "er", "es", "s", "e")
"""Of words that are compared without them (`stems`)."""
SHORTEST_STEM = 3
"""Letters that are left of a word without its ending."""
FILLS = 0.25
"""Share of its box that a thing fills: a crop of a thinner one shows mostly something else."""


@dataclass(frozen=True, kw_only=True)
class AnnotatedThing:
    """One object of a picture."""

    name: str
    """Its words in small letters, without an article: `dog`, `red cup`."""
    mask: RLE
    box: Box
    area: int
    clear: bool
    """Large and compact enough to be shown by a crop, and no crowd."""
    cut: bool
    """Touches the picture's edge, so its size is not known."""

    @property
    def middle(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def phrase(self) -> str:
        return f"the {self.name}"


@dataclass(frozen=True, kw_only=True)
class AnnotatedPicture:
    """A photograph and everything that its data set says is in it."""

    picture_id: str
    frame: ImageRef
    width: int
    height: int
    things: Mapping[str, tuple[AnnotatedThing, ...]]
    """All objects of every name."""
    crowds: Collection[str]
    """Names that also have a crowd: they can't be counted."""
    absent: Collection[str]
    """Names of which there is surely none."""
    annotated: bool
    """Its set has categories: all things of each are annotated, so they can be counted. Expressions name some
    of several."""

    def single(self) -> list[AnnotatedThing]:
        """Return the things that their names mean alone and that a crop shows."""
        return [
            things[0]
            for name, things in self.things.items()
            if len(things) == 1
            and name not in self.crowds
            and things[0].clear
            and not self.may_mean_another(name)
        ]

    def may_mean_another(self, name: str) -> bool:
        """Tell whether a thing that is none of this name's has all its words and more: a teddy bear may be
        called a bear."""
        words, own = set(words_of(name)), self.things.get(name, ())
        longer = [things for other, things in self.things.items() if words < set(words_of(other))]
        return any(all(distinct(thing, one) for one in own) for things in longer for thing in things)


def askable(sample: Sample) -> bool:
    """Tell whether a sample names something in a single picture, in words that a question can hold."""
    return (
        sample.task == "referring"
        and len(sample.frames) == 1
        and 0 < len(name_of(sample.text or "")) <= LONGEST_NAME
    )


def pictures(samples: Iterable[Sample]) -> list[AnnotatedPicture]:
    """Group referring samples of single pictures by picture, and their masks by name (`cat`, `a cat` and `the
    cat` are one); the same mask is one thing. Absent is what a sample without masks says, and, where classes
    are annotated (`meta["category"]`, as in COCO), every class of the set that the picture has none of."""
    of_picture: defaultdict[tuple[str, Path | None], list[Sample]] = defaultdict(list)
    for sample in samples:
        if askable(sample):
            of_picture[sample.image_id, _file(sample.frames[0])].append(sample)
    ids = Counter(picture_id for picture_id, _ in of_picture)
    classes = {
        name_of(s.text) for group in of_picture.values() for s in group if s.meta.get("category") and s.text
    }
    grouped = []
    for (picture_id, file), group in of_picture.items():
        # parts of a set may number their pictures alike
        if ids[picture_id] > 1 and file is not None:
            picture_id = f"{picture_id}/{_short(file.as_posix())}"
        things: dict[str, list[AnnotatedThing]] = {}
        for sample in group:
            same_name = things.setdefault(name_of(sample.text or ""), [])
            for (mask,) in sample.masks:
                if mask is not None and mask not in [thing.mask for thing in same_name]:
                    same_name.append(thing_of(sample, mask))
        annotated = any(s.meta.get("category") for s in group)
        grouped.append(
            AnnotatedPicture(
                picture_id=picture_id,
                frame=group[0].frames[0],
                width=group[0].width,
                height=group[0].height,
                things={name: tuple(some) for name, some in things.items() if some},
                crowds={name_of(s.text or "") for s in group if s.meta.get("joined")},
                absent={name for name, some in things.items() if not some}
                | ((classes - things.keys()) if annotated else set()),
                annotated=annotated,
            )
        )
    return grouped


def _file(frame: ImageRef) -> Path | None:
    match frame:
        case Path():
            return frame
        case FilePart(file=Path() as file) | VideoFrame(file=file):
            return file
    return None


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def name_of_file(part: str) -> str:
    """Return a part of a path, shortened, and without the meaning of `..`: ids of pictures may be paths."""
    if len(part.encode()) > LONGEST_FILE:
        return f"{part[: LONGEST_FILE // 4]}-{_short(part)}"
    return part if part.strip(".") else "_"


def name_of(text: str) -> str:
    """A sample's words as a name: in small letters, without article and full stop."""
    plain = " ".join(text.lower().split()).removesuffix(".").strip()
    for article in ("the ", "a ", "an "):
        if plain.startswith(article):
            return plain[len(article) :]
    return plain


def words_of(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())


def stems(text: str) -> set[str]:
    """Return the words in small letters without their endings, so that forms of one word are equal: `leftmost`
    and `left`, `bigger` and `big`. Some unlike words are, too (`corner` and `corn`)."""
    return {_stem(word) for word in words_of(text)}


def _stem(word: str) -> str:
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= SHORTEST_STEM:
            return _stem(word.removesuffix(ending))
    return word[:-1] if len(word) > SHORTEST_STEM and word[-1] == word[-2] else word


def thing_of(sample: Sample, mask: RLE) -> AnnotatedThing:
    area, box = rle.area(mask), rle.pixel_box(mask)
    wide, high = box[2] - box[0], box[3] - box[1]
    large = min(wide, high) >= SMALLEST_SIDE and area >= SMALLEST_AREA * sample.width * sample.height
    return AnnotatedThing(
        name=name_of(sample.text or ""),
        mask=mask,
        box=box,
        area=area,
        clear=large and area >= FILLS * wide * high,
        cut=box[0] <= 1 or box[1] <= 1 or box[2] >= sample.width - 1 or box[3] >= sample.height - 1,
    )


def distinct(*things: AnnotatedThing) -> bool:
    """Tell whether no two of these are one thing of two names."""
    return all(rle.iou(one.mask, other.mask) <= SAME_IOU for one, other in combinations(things, 2))
