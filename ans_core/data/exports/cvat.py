"""CVAT's `annotations.xml` (CVAT for images 1.1) -> records: polygons, rectangles, ellipses and masks, with
labels and attributes."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np

from ans_core.data.exports.labelled import (
    SPLITS,
    Export,
    Shape,
    clipped,
    corners,
    each,
    ellipse,
    find,
    joined,
    placed,
    turned,
    xml_root,
)
from ans_core.data.formats import checks
from ans_core.data.formats.media import Media, picture_of
from ans_core.pictures import rle

SHAPES = ("polygon", "box", "ellipse", "mask")
ROOT = "annotations"


def read(place: Path, file: Path) -> Export:
    """Read a file of CVAT for images; pictures are in `images/` beside it, or beside it. Shapes of one group
    are one object in pieces. Points, lines, cuboids, skeletons and tags have no pixels: left out and
    counted."""
    root = xml_root(file)
    if root.tag != ROOT or root.find("track") is not None:
        what = (
            "of CVAT for video"
            if root.find("track") is not None
            else f"no CVAT file, its root is {root.tag!r}"
        )
        raise checks.DataError(f"{file} is {what}; export the task as `CVAT for images 1.1`")
    return each(file, root.iter("image"), _picture)


def _picture(image: Element, export: Export) -> None:
    file = export.file
    where = f"{file}: image {rle.short(image.get('id', '?'))} ({image.get('name', '')[:60]})"
    elements = [shape for shape in image if shape.tag in SHAPES]
    for other in image:
        if other.tag not in SHAPES:
            export.without_pixels(other.tag)
    if not elements:
        export.left_out["pictures without a shape"] += 1
        return
    name = _attribute(image, "name", where=where)
    subset = image.get("subset", "")
    path = find([file.parent / "images" / subset, file.parent / "images", file.parent], name, where=where)
    stated = (int(_number(image, "height", where=where)), int(_number(image, "width", where=where)))
    picture = picture_of(path, where, stated=stated)
    groups: dict[str, list[Shape]] = {}
    for number, shape in enumerate(elements):
        with export.faults:
            here = f"{where}, {shape.tag} {number}"
            mask = export.mask(_segmentation(shape, picture, here), picture, here)
            if mask is None:
                continue
            texts = tuple((a.get("name", "").lower(), a.text or "") for a in shape.iter("attribute"))
            label = checks.text(shape.get("label"), f"{here}, label")
            group = shape.get("group_id", "0")
            pieces = groups.setdefault(f"group {group}" if group != "0" else f"shape {number}", [])
            pieces.append(Shape(mask=mask, label=label, texts=texts))
    for name, pieces in groups.items():
        if len(labels := sorted({piece.label for piece in pieces})) > 1:
            raise checks.DataError(
                f"{where}, {name}: shapes of one group have the labels {labels}; a group is one object, give "
                "it one label"
            )
    export.add(path, map(joined, groups.values()), split=SPLITS.get(subset.lower()))


def _segmentation(shape: Element, picture: Media, where: str) -> object:
    def value(key: str) -> float:
        return _number(shape, key, where=where)

    rotation = value("rotation") if shape.get("rotation") is not None else 0.0
    if shape.tag == "mask":
        return _runs(shape, picture, where)
    if shape.tag == "polygon":
        pairs = [pair.split(",") for pair in _attribute(shape, "points", where=where).split(";")]
        try:
            points = [(float(x), float(y)) for x, y in pairs]
        except ValueError:
            raise checks.DataError(
                f"{where}: points {rle.short(shape.get('points'))} are not x,y;x,y;..."
            ) from None
    elif shape.tag == "box":
        x0, y0, x1, y1 = (value(key) for key in ("xtl", "ytl", "xbr", "ybr"))
        points = turned(corners(x0, y0, x1, y1), ((x0 + x1) / 2, (y0 + y1) / 2), rotation)
    else:
        centre = value("cx"), value("cy")
        points = turned(ellipse(*centre, value("rx"), value("ry")), centre, rotation)
    return clipped(points, picture)


def _runs(shape: Element, picture: Media, where: str) -> object:
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
    return placed(part, picture, left=left, top=top, where=where)


def _attribute(element: Element, key: str, *, where: str) -> str:
    if (value := element.get(key)) is None:
        raise checks.DataError(f"{where}: {element.tag} has no {key!r}, only {sorted(element.keys())}")
    return value


def _number(element: Element, key: str, *, where: str) -> float:
    """Return a finite number."""
    try:
        if math.isfinite(value := float(_attribute(element, key, where=where))):
            return value
    except ValueError as error:
        if isinstance(error, checks.DataError):  # it has no such attribute
            raise
    raise checks.DataError(f"{where}: {key} {rle.short(element.get(key))} is no number")
