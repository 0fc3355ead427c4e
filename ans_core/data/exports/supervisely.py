"""Supervisely's project (`<data set>/ann/<picture>.json`, pictures in `img/`) -> records: polygons,
rectangles and bitmaps."""

from __future__ import annotations

import base64
import binascii
import zlib
from pathlib import Path
from typing import Any

from PIL import UnidentifiedImageError

from ans_core.data.exports.labelled import (
    SPLITS,
    Export,
    Shape,
    corners,
    each,
    find,
    mask_of_png,
    placed,
    split_of,
)
from ans_core.data.formats import checks
from ans_core.data.formats.media import Media, picture_of
from ans_core.pictures import rle
from ans_core.types import RLE


class Size(checks.Record):
    height: int
    width: int


class Labels(checks.Record):
    size: Size
    objects: list[Any]
    tags: list[Any] = []


class Object(checks.Record):
    classTitle: str
    geometryType: str = "polygon"
    points: dict[str, Any] = {}
    bitmap: dict[str, Any] | None = None
    tags: list[Any] = []


def read(place: Path, files: list[Path]) -> Export:
    """An object's tag `text`, `caption` ... is a text about it. A picture's tag or the data set's name tells
    the split."""

    def read_file(file: Path, export: Export) -> None:
        labels = checks.load(Labels, file)
        path = find([file.parent.parent / "img", file.parent], file.stem, where=str(file))
        picture = picture_of(path, str(file), stated=(labels.size.height, labels.size.width))
        shapes = []
        for number, value in enumerate(labels.objects):
            with export.faults:
                where = f"{file}: object {number}"
                record = checks.record(Object, value, where)
                segmentation = _segmentation(record, picture, where)
                if segmentation is None:
                    export.without_pixels(record.geometryType)
                elif mask := export.mask(segmentation, picture, where):
                    texts = tuple((name.lower(), str(text)) for name, text in _tags(record.tags) if text)
                    label = checks.text(record.classTitle, f"{where}, classTitle")
                    shapes.append(Shape(mask=mask, label=label, texts=texts))
        if not labels.objects:
            export.left_out["pictures without an object"] += 1
        tagged = next(
            (SPLITS[name.lower()] for name, _ in _tags(labels.tags) if name.lower() in SPLITS), None
        )
        export.add(path, shapes, split=tagged or split_of(file, place))

    return each(place, files, read_file)


def _tags(tags: list[Any]) -> list[tuple[str, Any]]:
    return [(str(tag.get("name", "")), tag.get("value")) for tag in tags if isinstance(tag, dict)]


def _segmentation(record: Object, picture: Media, where: str) -> object:
    """Return the object as polygons or RLE; None if it has no pixels."""
    if record.geometryType == "bitmap":
        return _bitmap(record.bitmap or {}, picture, where)
    if record.geometryType not in ("polygon", "rectangle"):
        return None
    try:
        outline = [(float(x), float(y)) for x, y in record.points["exterior"]]
        holes = [
            [float(part) for point in hole for part in point] for hole in record.points.get("interior", [])
        ]
    except (KeyError, TypeError, ValueError):
        raise checks.DataError(
            f"{where}: points are {rle.short(record.points)}, not exterior and interior"
        ) from None
    if record.geometryType == "rectangle" and len(outline) == 2:
        (x0, y0), (x1, y1) = outline
        outline = corners(x0, y0, x1, y1)
    polygon = [part for point in outline for part in point]
    if not holes:
        return [polygon]
    full = rle.decode(picture.some_mask([polygon], where))
    inside = rle.decode(picture.some_mask(holes, f"{where}, interior"))
    return rle.encode(full & ~inside)


def _bitmap(bitmap: dict[str, Any], picture: Media, where: str) -> RLE:
    """Decode a PNG, packed by zlib and base64, at its origin [left, top]."""
    try:
        left, top = bitmap["origin"]
        mask = mask_of_png(zlib.decompress(base64.b64decode(bitmap["data"])))
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error, UnidentifiedImageError) as error:
        raise checks.DataError(f"{where}: its bitmap can't be decoded ({error!r}); export it again") from None
    return placed(mask, picture, left=left, top=top, where=where)
