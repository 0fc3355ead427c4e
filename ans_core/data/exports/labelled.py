"""What readers of exports return, and how the shapes of one picture become records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ans_core import nearest_file, rle
from ans_core.data.formats import checks
from ans_core.types import RLE

NO_PIXEL = "objects without a pixel"
"""A reason to leave out."""
ImportedTask = Literal["referring", "region_caption"]
SPLITS = {"train": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}
TEXTS = {"text": "referring", "expression": "referring", "caption": "region_caption", "description": "region_caption"}
"""Names of an attribute or field whose value is a text about the object, and the task that it makes; the label is not used then."""
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


@dataclass(kw_only=True)
class Export:
    file: Path
    labelled: list[Labelled] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason."""
    drawn_upright: bool = True
    """Whether masks are of pictures as labelling tools show them, upright, where sizes don't tell that they are of the stored pixels."""

    def check(self) -> None:
        if not self.labelled:
            why = "; ".join(f"{count} {reason}" for reason, count in self.left_out.items())
            raise checks.DataError(f"{self.file}: no mask in it ({why or 'no picture has a shape'}); draw polygons, boxes or masks")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An object of a picture: its mask, its label, and texts about it by the name of their field."""

    mask: RLE
    label: str
    texts: tuple[tuple[str, str], ...] = ()


def records(picture: Path, shapes: Iterable[Shape], *, split: str | None) -> list[Labelled]:
    """Return a referring record a text, which means all objects that have it (a label where an object has no text), and a region caption
    an object with a caption."""
    meant: dict[str, tuple[str, list[RLE]]] = {}
    captions: list[Labelled] = []
    for shape in shapes:
        texts = [(TEXTS[name], checks.text(text, where=str(picture))) for name, text in shape.texts if name in TEXTS and text.strip()]
        for task, text in texts or [("referring", shape.label)]:
            if task == "referring":
                meant.setdefault(checks.text_key(text), (text, []))[1].append(shape.mask)
            else:
                captions.append(Labelled(picture=picture, text=text, masks=[shape.mask], task="region_caption", split=split))
    return [Labelled(picture=picture, text=text, masks=masks, split=split) for text, masks in meant.values()] + captions


def find(folders: Sequence[Path], name: str, *, where: str) -> Path:
    """Return the picture that an export names: by its whole path below one of the folders, or by its last part, with or without an
    upload's prefix."""
    leaf = name.rpartition("/")[2]
    for folder in folders:
        for candidate in dict.fromkeys((name.lstrip("/"), leaf, UPLOADED.sub("", leaf))):
            if candidate and (path := checks.inside(folder, candidate, where=where)).is_file():
                return path
    searched, nearest = ", ".join(map(str, folders)), nearest_file.hint(*(folder / name.lstrip("/") for folder in folders))
    raise checks.DataError(
        f"{where}: the picture {rle.short(name)} is not in {searched}; export with the pictures, or put them there{nearest}"
    )


def turned(points: Sequence[tuple[float, float]], around: tuple[float, float], degrees: float) -> list[float]:
    """Return the polygon's coordinates, turned clockwise as seen on the screen."""
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    x0, y0 = around
    return [part for x, y in points for part in (x0 + (x - x0) * cosine - (y - y0) * sine, y0 + (x - x0) * sine + (y - y0) * cosine)]


def ellipse(x: float, y: float, radius_x: float, radius_y: float) -> list[tuple[float, float]]:
    """Return an ellipse as a polygon of 72 points."""
    steps = [math.radians(5 * step) for step in range(72)]
    return [(x + radius_x * math.cos(angle), y + radius_y * math.sin(angle)) for angle in steps]
