"""labelme's `<picture>.json` (shapes, imagePath) -> records: polygons, rectangles, circles and masks, by
label and group."""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from PIL import Image, UnidentifiedImageError

from ans_core.data.exports.labelled import (
    Export,
    Shape,
    clipped,
    each_picture,
    ellipse,
    find,
    placed,
    records,
    split_of,
)
from ans_core.data.formats import checks
from ans_core.data.formats.reasonseg import Point
from ans_core.pictures import rle
from ans_core.types import RLE


class LabelmeShape(checks.Record):
    label: str
    points: list[Point]
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

    def picture(file: Path, export: Export, faults: checks.Faults) -> None:
        content = checks.record(LabelmeFile, checks.load_json(file), where=str(file))
        image = _picture(file, content.imagePath, place)
        size = checks.image_size(image, where=str(file), stated=(content.imageHeight, content.imageWidth))
        groups: dict[tuple[str, object], list[tuple[LabelmeShape, RLE]]] = {}
        for number, value in enumerate(content.shapes):
            with faults:
                where = f"{file}: shape {number}"
                shape = checks.record(LabelmeShape, value, where=where)
                label = checks.text(shape.label, where=f"{where}, label")
                if mask := _mask(shape, size, export, where=where):
                    group = number if shape.group_id is None else f"group {shape.group_id}"
                    groups.setdefault((label, group), []).append((shape, mask))
        shapes = [_object(label, pieces) for (label, _), pieces in groups.items()]
        if not content.shapes:
            export.left_out["pictures without a shape"] += 1
        export.labelled += records(image, shapes, split=split_of(file, place))

    return each_picture(place, files, picture)


def _picture(file: Path, name: str, place: Path) -> Path:
    """The path is relative to the file, often written on Windows and on another machine."""
    folder, _, leaf = name.replace("\\", "/").rpartition("/")
    stated = Path(os.path.normpath(file.parent / folder))
    folders = [stated] if stated.is_relative_to(place) else []
    return find([*folders, file.parent, file.parent / "../images", place], leaf, where=str(file))


def _object(label: str, pieces: list[tuple[LabelmeShape, RLE]]) -> Shape:
    texts = tuple(
        dict.fromkeys(("description", shape.description) for shape, _ in pieces if shape.description)
    )
    return Shape(mask=rle.union([mask for _, mask in pieces]), label=label, texts=texts)


def _mask(shape: LabelmeShape, size: tuple[int, int], export: Export, *, where: str) -> RLE | None:
    height, width = size
    if shape.shape_type == "mask":
        mask = rle.encode(_box_mask(shape, size, where=where))
        return export.mask(mask, height=height, width=width, where=where)
    points, kind = shape.points, shape.shape_type
    if kind == "rectangle" and len(points) == 2:
        (x0, y0), (x1, y1) = points
        points = [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]
    elif kind == "circle" and len(points) == 2:  # the centre, and a point of the edge
        (x, y), radius = points[0], math.dist(*points)
        points = [[*point] for point in ellipse(x, y, radius, radius)]
    elif kind not in ("polygon", "rectangle", "oriented_rectangle"):
        export.left_out[f"of type {kind}, which has no pixels"] += 1
        return None
    polygon = clipped([part for point in points for part in point], height, width)
    return export.mask([polygon], height=height, width=width, where=where)


def _box_mask(shape: LabelmeShape, size: tuple[int, int], *, where: str) -> Bool[np.ndarray, "H W"]:
    """Decode a PNG of the box whose upper left pixel is the first point."""
    try:
        left, top = map(round, shape.points[0])
        part = np.asarray(Image.open(io.BytesIO(base64.b64decode(shape.mask or ""))).convert("1"))
    except (IndexError, ValueError, binascii.Error, UnidentifiedImageError) as error:
        raise checks.DataError(f"{where}: no mask of two points and a PNG ({error}); draw it again") from None
    return placed(part, left=left, top=top, height=size[0], width=size[1], where=where)
