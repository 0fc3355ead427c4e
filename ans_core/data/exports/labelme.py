"""labelme's `<picture>.json` (shapes, imagePath) -> records: polygons, rectangles, circles and masks, by
label and group."""

from __future__ import annotations

import base64
import binascii
import math
import os
from pathlib import Path
from typing import Any

from PIL import UnidentifiedImageError

from ans_core.data.exports.labelled import (
    Export,
    Point,
    Shape,
    clipped,
    corners,
    each,
    ellipse,
    find,
    joined,
    mask_of_png,
    placed,
    split_of,
)
from ans_core.data.formats import checks, reasonseg
from ans_core.data.formats.media import Media, picture_of
from ans_core.types import RLE


class LabelmeShape(checks.Record):
    label: str
    points: list[reasonseg.Point]
    shape_type: str = "polygon"
    group_id: Any = None
    description: str | None = None
    mask: str | None = None


class LabelmeFile(checks.Record):
    imagePath: str
    shapes: list[Any]
    imageHeight: int | None = None
    imageWidth: int | None = None


def read(place: Path, files: list[Path]) -> Export:
    """Shapes of one label and group are one object in pieces; a shape's description makes a region caption.
    Points and lines have no pixels: left out and counted. Folders named train, val ... tell the split."""

    def read_file(file: Path, export: Export) -> None:
        content = checks.load(LabelmeFile, file)
        path = _picture(file, content.imagePath, place)
        stated = (content.imageHeight, content.imageWidth)
        picture = picture_of(path, str(file), stated=stated)
        groups: dict[tuple[str, object], list[Shape]] = {}
        for number, value in enumerate(content.shapes):
            with export.faults:
                where = f"{file}: shape {number}"
                shape = checks.record(LabelmeShape, value, where)
                label = checks.text(shape.label, f"{where}, label")
                if mask := _mask(shape, picture, export, where):
                    group = number if shape.group_id is None else f"group {shape.group_id}"
                    texts = (("description", shape.description),) if shape.description else ()
                    piece = Shape(mask=mask, label=label, texts=texts)
                    groups.setdefault((label, group), []).append(piece)
        if not content.shapes:
            export.left_out["pictures without a shape"] += 1
        export.add(path, map(joined, groups.values()), split=split_of(file, place))

    return each(place, files, read_file)


def _picture(file: Path, name: str, place: Path) -> Path:
    """The path is relative to the file, often written on Windows and on another machine."""
    folder, _, leaf = name.replace("\\", "/").rpartition("/")
    stated = Path(os.path.normpath(file.parent / folder))
    folders = [stated] if stated.is_relative_to(place) else []
    return find([*folders, file.parent, file.parent / "../images", place], leaf, where=str(file))


def _mask(shape: LabelmeShape, picture: Media, export: Export, where: str) -> RLE | None:
    if shape.shape_type == "mask":
        return export.mask(_box_mask(shape, picture, where), picture, where)
    points: list[Point] = [(x, y) for x, y in shape.points]
    kind = shape.shape_type
    if kind == "rectangle" and len(points) == 2:
        (x0, y0), (x1, y1) = points
        points = corners(x0, y0, x1, y1)
    elif kind == "circle" and len(points) == 2:  # the centre, and a point of the edge
        radius = math.dist(*points)
        points = ellipse(*points[0], radius, radius)
    elif kind not in ("polygon", "rectangle", "oriented_rectangle"):
        export.without_pixels(kind)
        return None
    return export.mask(clipped(points, picture), picture, where)


def _box_mask(shape: LabelmeShape, picture: Media, where: str) -> RLE:
    """Decode a PNG of the box whose upper left pixel is the first point."""
    try:
        left, top = map(round, shape.points[0])
        part = mask_of_png(base64.b64decode(shape.mask or ""))
    except (IndexError, ValueError, binascii.Error, UnidentifiedImageError) as error:
        raise checks.DataError(f"{where}: no mask of two points and a PNG ({error}); draw it again") from None
    return placed(part, picture, left=left, top=top, where=where)
