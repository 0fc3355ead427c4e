"""CVAT's `annotations.xml` (CVAT for images 1.1) -> records: polygons, rectangles, ellipses and masks, with
labels and attributes."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from ans_core.data.exports.labelled import (
    NO_PIXEL,
    SPLITS,
    TEXTS,
    Export,
    Shape,
    clipped,
    ellipse,
    find,
    placed,
    records,
    turned,
)
from ans_core.data.formats import checks
from ans_core.pictures import rle
from ans_core.types import RLE

SHAPES = ("polygon", "box", "ellipse", "mask")
ROOT = "annotations"


def read(place: Path, file: Path) -> Export:
    """Read a file of CVAT for images; pictures are in `images/` beside it, or beside it. Shapes of one group
    are one object in pieces. Points, lines, cuboids, skeletons and tags have no pixels: left out and
    counted."""
    try:
        root = ElementTree.fromstring(file.read_bytes())
    except ElementTree.ParseError as error:
        raise checks.DataError(
            f"{file}: line {error.position[0]}: no XML ({error}); export it again"
        ) from None
    except LookupError as error:  # an encoding that nobody knows
        raise checks.DataError(f"{file}: {error}; export it again") from None
    if root.tag != ROOT or root.find("track") is not None:
        what = (
            "of CVAT for video"
            if root.find("track") is not None
            else f"no CVAT file, its root is {root.tag!r}"
        )
        raise checks.DataError(f"{file} is {what}; export the task as `CVAT for images 1.1`")
    export, faults = Export(file=file), checks.Faults(file)
    for image in root.iter("image"):
        with faults:
            _picture(image, export, file, faults)
    faults.tell()
    return export


def _picture(image: ElementTree.Element, export: Export, file: Path, faults: checks.Faults) -> None:
    where = f"{file}: image {rle.short(image.get('id', '?'))} ({image.get('name', '')[:60]})"
    elements = [shape for shape in image if shape.tag in SHAPES]
    for other in image:
        if other.tag not in SHAPES:
            export.left_out[f"of type {other.tag}, which has no pixels"] += 1
    if not elements:
        export.left_out["pictures without a shape"] += 1
        return
    name = _attribute(image, "name", where=where)
    subset = image.get("subset", "")
    picture = find([file.parent / "images" / subset, file.parent / "images", file.parent], name, where=where)
    stated = (int(_number(image, "height", where=where)), int(_number(image, "width", where=where)))
    height, width = checks.image_size(picture, where=where, stated=stated)
    groups: dict[str, list[tuple[ElementTree.Element, RLE]]] = {}
    for number, shape in enumerate(elements):
        with faults:
            try:
                mask = _mask(shape, height=height, width=width, where=f"{where}, {shape.tag} {number}")
            except checks.NoPixelError:
                export.left_out[NO_PIXEL] += 1
                continue
            group = shape.get("group_id", "0")
            groups.setdefault(f"group {group}" if group != "0" else f"shape {number}", []).append(
                (shape, mask)
            )
    shapes = [_object(pieces, where=f"{where}, {name}") for name, pieces in groups.items()]
    export.labelled += records(picture, shapes, split=SPLITS.get(subset.lower()))


def _object(pieces: list[tuple[ElementTree.Element, RLE]], *, where: str) -> Shape:
    labels = sorted({shape.get("label", "") for shape, _ in pieces})
    if len(labels) > 1:
        raise checks.DataError(
            f"{where}: shapes of one group have the labels {labels}; a group is one object, give it one label"
        )
    attributes = [
        (a.get("name", "").lower(), a.text or "") for shape, _ in pieces for a in shape.iter("attribute")
    ]
    texts = tuple(dict.fromkeys((name, text) for name, text in attributes if name in TEXTS))
    return Shape(
        mask=rle.union([mask for _, mask in pieces]),
        label=checks.text(labels[0], where=f"{where}, label"),
        texts=texts,
    )


def _mask(shape: ElementTree.Element, *, height: int, width: int, where: str) -> RLE:
    def value(key: str) -> float:
        return _number(shape, key, where=where)

    rotation = value("rotation") if shape.get("rotation") is not None else 0.0
    if shape.tag == "mask":
        return _runs(shape, height=height, width=width, where=where)
    if shape.tag == "polygon":
        pairs = [pair.split(",") for pair in _attribute(shape, "points", where=where).split(";")]
        try:
            polygon = [float(part) for x, y in pairs for part in (x, y)]
        except ValueError:
            raise checks.DataError(
                f"{where}: points {rle.short(shape.get('points'))} are not x,y;x,y;..."
            ) from None
    elif shape.tag == "box":
        x0, y0, x1, y1 = (value(key) for key in ("xtl", "ytl", "xbr", "ybr"))
        polygon = turned([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], ((x0 + x1) / 2, (y0 + y1) / 2), rotation)
    else:
        centre = value("cx"), value("cy")
        polygon = turned(ellipse(*centre, value("rx"), value("ry")), centre, rotation)
    return checks.mask(clipped(polygon, height, width), height=height, width=width, where=where)


def _runs(shape: ElementTree.Element, *, height: int, width: int, where: str) -> RLE:
    """Decode run lengths of a box of the picture: rows from the top, background first."""
    left, top, wide, high = (
        int(_number(shape, key, where=where)) for key in ("left", "top", "width", "height")
    )
    words = _attribute(shape, "rle", where=where).split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise checks.DataError(f"{where}: rle {rle.short(shape.get('rle'))} is no list of lengths")
    lengths = [int(word) for word in words]
    if sum(lengths) != wide * high:
        raise checks.DataError(
            f"{where}: the lengths of its rle add up to {sum(lengths)}, its box has {wide} x {high} pixels"
        )
    part = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(high, wide)
    full = placed(part, left=left, top=top, height=height, width=width, where=where)
    return checks.mask(rle.encode(full), height=height, width=width, where=where)


def _attribute(element: ElementTree.Element, key: str, *, where: str) -> str:
    if (value := element.get(key)) is None:
        raise checks.DataError(f"{where}: {element.tag} has no {key!r}, only {sorted(element.keys())}")
    return value


def _number(element: ElementTree.Element, key: str, *, where: str) -> float:
    """Return a finite number."""
    try:
        if math.isfinite(value := float(_attribute(element, key, where=where))):
            return value
    except ValueError as error:
        if isinstance(error, checks.DataError):  # it has no such attribute
            raise
    raise checks.DataError(f"{where}: {key} {rle.short(element.get(key))} is no number")
