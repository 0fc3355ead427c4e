"""What readers of exports return, and how the shapes of one picture become records."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar
from xml.etree import ElementTree

import numpy as np
from jaxtyping import Bool, Int64
from PIL import Image

from ans_core import nearest_file
from ans_core.data.formats import checks
from ans_core.data.formats.files import find_file
from ans_core.data.formats.media import Media
from ans_core.data.formats.plain import MEANT
from ans_core.pictures import rle
from ans_core.split_names import SPLIT_OF
from ans_core.types import RLE

NO_PIXEL = "objects without a pixel"
"""A reason to leave out."""
Item = TypeVar("Item")
Point = tuple[float, float]
ImportedTask = Literal["referring", "region_caption"]
SPLITS = {"train": "train", "val": "val", "test": "test"} | MEANT
"""Name of a folder, subset or tag -> split."""
SUFFIXES = nearest_file.PICTURES
TEXTS = {
    "text": "referring",
    "expression": "referring",
    "caption": "region_caption",
    "description": "region_caption",
}
"""Names of an attribute or field whose value is a text about the object, and the task that it makes; the
label is not used then."""
UPLOADED = re.compile(r"^[0-9a-f]{8}-")
"""What Label Studio puts before the name of an uploaded file."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """One record of annotations.json."""

    picture: Path
    text: str
    masks: Sequence[RLE]
    task: ImportedTask = "referring"
    split: str | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An object of a picture: its mask, its label, and texts by the name of their field, of which those of
    TEXTS count."""

    mask: RLE
    label: str
    texts: tuple[tuple[str, str], ...] = ()


def joined(pieces: Sequence[Shape]) -> Shape:
    """Return the one object of which shapes of a label are pieces."""
    texts = dict.fromkeys(text for piece in pieces for text in piece.texts)
    return replace(pieces[0], mask=rle.union([piece.mask for piece in pieces]), texts=tuple(texts))


@dataclass(kw_only=True)
class Export:
    file: Path
    labelled: list[Labelled] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason."""
    masks_upright: bool = True
    """Whether masks are of pictures as labelling tools show them, upright, where sizes don't tell that they
    are of the stored pixels."""

    def __post_init__(self) -> None:
        self.faults = checks.Faults(self.file)

    def mask(self, segmentation: object, picture: Media, where: str) -> RLE | None:
        """Decode an object's mask. One that teaches nothing, as it has no pixel, is counted and None."""
        try:
            return picture.mask(segmentation, where)
        except checks.NoPixelError:
            self.left_out[NO_PIXEL] += 1
            return None

    def without_pixels(self, kind: str) -> None:
        """Count a shape of this type, as points and lines."""
        self.left_out[f"of type {kind}, which has no pixels"] += 1

    def add(self, picture: Path, shapes: Iterable[Shape], *, split: str | None) -> None:
        """Add a referring record a text, which means all objects that have it (a label where an object has no
        text), and a region caption an object with a caption."""
        meant: dict[str, tuple[str, list[RLE]]] = {}
        captions: list[Labelled] = []
        for shape in shapes:
            texts = [
                (TEXTS[name], checks.text(text, str(picture)))
                for name, text in shape.texts
                if name in TEXTS and text.strip()
            ]
            for task, text in texts or [("referring", shape.label)]:
                if task == "referring":
                    meant.setdefault(checks.text_key(text), (text, []))[1].append(shape.mask)
                else:
                    masks = [shape.mask]
                    captions.append(
                        Labelled(picture=picture, text=text, masks=masks, task="region_caption", split=split)
                    )
        self.labelled += [
            Labelled(picture=picture, text=text, masks=masks, split=split) for text, masks in meant.values()
        ]
        self.labelled += captions

    def check(self) -> None:
        if not self.labelled:
            why = "; ".join(f"{count} {reason}" for reason, count in self.left_out.items())
            raise checks.DataError(
                f"{self.file}: no mask in it ({why or 'no picture has a shape'}); draw polygons, boxes or "
                "masks"
            )


def each(file: Path, items: Iterable[Item], read: Callable[[Item, Export], None]) -> Export:
    """Read what holds the labels of one picture each. Raises DataError for all faults together."""
    export = Export(file=file)
    for item in items:
        with export.faults:
            read(item, export)
    export.faults.tell()
    return export


def xml_root(file: Path) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(file.read_bytes())
    except (ElementTree.ParseError, LookupError) as error:  # LookupError: an encoding that nobody knows
        raise checks.DataError(f"{file}: no XML ({error}); export it again") from None


def split_of(file: Path, place: Path) -> str | None:
    """Return the split that the innermost folder of that name below `place` tells, as `train`, `valid` or
    `val2017`."""
    folders = file.relative_to(place).parts[:-1]
    return next(
        (
            SPLITS[name]
            for folder in reversed(folders)
            if (name := folder.lower().rstrip("0123456789")) in SPLITS
        ),
        None,
    )


def listed_splits(place: Path) -> dict[str, str]:
    """Return picture (without suffix) -> split by Pascal VOC's lists, `ImageSets/<task>/train.txt`; those of
    one class have other names."""
    lists = [
        (SPLITS[file.stem.lower()], file)
        for file in sorted(place.rglob("ImageSets/*/*.txt"))
        if file.stem.lower() in SPLITS
    ]
    return {
        line.split()[0]: split
        for split, file in lists
        for line in checks.load_text(file).splitlines()
        if line.strip()
    }


def split_of_file(file: Path, place: Path) -> str | None:
    """Return the split that a file's own name tells, as `instances_train2017.json` or `val.json`, else its
    folders'."""
    named = SPLIT_OF.fullmatch(file.stem)
    return SPLITS[named["split"].lower()] if named else split_of(file, place)


def picture_folders(file: Path) -> list[Path]:
    """Return where the pictures of a file of COCO's kind may be: in a folder of its split, in `images/`, or
    beside it."""
    subset = file.stem.partition("_")[2] or file.stem  # instances_train2017 -> train2017
    names = dict.fromkeys(
        f"{folder}{name}" for name in (subset, subset.rstrip("0123456789")) for folder in ("", "images/")
    )
    return [file.parent / up / name for up in (".", "..") for name in [*names, "images", "."]]


def of_stem(folders: Iterable[Path], stem: str) -> Path | None:
    """Return the picture of this name with any suffix in the first folder that has one."""
    named = (folder / f"{stem}{suffix}" for folder in folders for suffix in sorted(SUFFIXES))
    return next((path for path in named if path.is_file()), None)


def find(folders: Sequence[Path], name: str, *, where: str) -> Path:
    """Return the picture that an export names: by its whole path below one of the folders, or by its last
    part, with or without an upload's prefix."""
    path = name.replace("\\", "/").lstrip("/")  # written on Windows
    leaf = path.rpartition("/")[2]
    names = [candidate for candidate in (path, leaf, UPLOADED.sub("", leaf)) if candidate]
    remedy = "export with the pictures, or put them there"
    return find_file(folders, names or [path], where=where, noun="picture", remedy=remedy)


def corners(left: float, top: float, right: float, bottom: float) -> list[Point]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def turned(points: Iterable[Point], around: Point, degrees: float) -> list[Point]:
    """Turn points clockwise as seen on the screen."""
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    x0, y0 = around
    return [
        (x0 + (x - x0) * cosine - (y - y0) * sine, y0 + (x - x0) * sine + (y - y0) * cosine)
        for x, y in points
    ]


def ellipse(x: float, y: float, radius_x: float, radius_y: float) -> list[Point]:
    """Return an ellipse as a polygon of 72 points."""
    steps = [math.radians(5 * step) for step in range(72)]
    return [(x + radius_x * math.cos(angle), y + radius_y * math.sin(angle)) for angle in steps]


def clipped(points: Iterable[Point], picture: Media) -> list[list[float]]:
    """Return the points as a polygon, moved to the picture's edge: tools draw a little over it, and circles
    and turned boxes may leave the picture."""
    moved = [(min(max(x, 0), picture.width), min(max(y, 0), picture.height)) for x, y in points]
    return [[*chain.from_iterable(moved)]]


def mask_of_png(content: bytes) -> Bool[np.ndarray, "h w"]:
    """Return the pixels that are not transparent, or of a picture without transparency those that are not 0:
    labelme writes 0 and 1, other tools 0 and 255."""
    picture = Image.open(io.BytesIO(content))
    transparent = (
        "A" in picture.getbands() or "transparency" in picture.info
    )  # value 0 of Supervisely's palette
    values = np.asarray(picture.convert("RGBA").getchannel("A") if transparent else picture)
    return (values if values.ndim == 2 else values[:, :, 0]) > 0


def placed(part: Bool[np.ndarray, "h w"], picture: Media, *, left: int, top: int, where: str) -> RLE:
    """Return the mask of the picture whose box from (left, top) on is `part`."""
    full = np.zeros(picture.size, bool)
    box = full[top : top + part.shape[0], left : left + part.shape[1]]
    if left < 0 or top < 0 or box.shape != part.shape:
        raise checks.DataError(
            f"{where}: its box of [height, width] = {list(part.shape)} at {[left, top]} leaves the picture "
            f"of {picture.width} x {picture.height}"
        )
    box[:] = part
    return rle.encode(full)


def colour_codes(picture: Image.Image) -> Int64[np.ndarray, "H W"]:
    """Return R + 256 G + 65,536 B of each pixel."""
    red, green, blue = np.moveaxis(np.asarray(picture.convert("RGB"), np.int64), 2, 0)
    return red + 256 * green + 65536 * blue
