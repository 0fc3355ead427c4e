"""Supervisely's project (`<data set>/ann/<picture>.json`, pictures in `img/`) -> records: polygons,
rectangles and bitmaps."""

from __future__ import annotations

import base64
import binascii
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from PIL import Image, UnidentifiedImageError

from ans_core.data.exports.labelled import (
    SPLITS,
    TEXTS,
    Export,
    Shape,
    each_picture,
    find,
    placed,
    records,
    split_of,
)
from ans_core.data.formats import checks
from ans_core.pictures import rle


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

    def picture(file: Path, export: Export, faults: checks.Faults) -> None:
        labels = checks.record(Labels, checks.load_json(file), where=str(file))
        image = find([file.parent.parent / "img", file.parent], file.stem, where=str(file))
        height, width = checks.image_size(
            image, where=str(file), stated=(labels.size.height, labels.size.width)
        )
        shapes = []
        for number, value in enumerate(labels.objects):
            with faults:
                where = f"{file}: object {number}"
                record = checks.record(Object, value, where=where)
                form = _form(record, height=height, width=width, where=where)
                if form is None:
                    export.left_out[f"of type {record.geometryType}, which has no pixels"] += 1
                elif mask := export.mask(form, height=height, width=width, where=where):
                    texts = tuple(
                        (name.lower(), str(text))
                        for name, text in _tags(record.tags)
                        if name.lower() in TEXTS and text
                    )
                    shapes.append(
                        Shape(
                            mask=mask,
                            label=checks.text(record.classTitle, where=f"{where}, classTitle"),
                            texts=texts,
                        )
                    )
        if not labels.objects:
            export.left_out["pictures without an object"] += 1
        tagged = next(
            (SPLITS[name.lower()] for name, _ in _tags(labels.tags) if name.lower() in SPLITS), None
        )
        export.labelled += records(image, shapes, split=tagged or split_of(file, place))

    return each_picture(place, files, picture)


def _tags(tags: list[Any]) -> list[tuple[str, Any]]:
    return [(str(tag.get("name", "")), tag.get("value")) for tag in tags if isinstance(tag, dict)]


def _form(record: Object, *, height: int, width: int, where: str) -> object:
    """Return the object as polygons or RLE; None if it has no pixels."""
    if record.geometryType == "bitmap":
        return rle.encode(_bitmap(record.bitmap or {}, height=height, width=width, where=where))
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
        outline = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    polygon = [part for point in outline for part in point]
    if not holes:
        return [polygon]
    full = rle.decode(checks.some_mask([polygon], height=height, width=width, where=where))
    inside = rle.decode(checks.some_mask(holes, height=height, width=width, where=f"{where}, interior"))
    return rle.encode(full & ~inside)


def _bitmap(bitmap: dict[str, Any], *, height: int, width: int, where: str) -> Bool[np.ndarray, "H W"]:
    """Decode a PNG, packed by zlib and base64, at its origin [left, top]; its alpha tells the object where it
    has one."""
    try:
        left, top = bitmap["origin"]
        part = Image.open(io.BytesIO(zlib.decompress(base64.b64decode(bitmap["data"]))))
        mask = np.asarray(part.getchannel("A") if "A" in part.getbands() else part.convert("1")) > 0
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error, UnidentifiedImageError) as error:
        raise checks.DataError(f"{where}: its bitmap can't be decoded ({error!r}); export it again") from None
    return placed(mask, left=left, top=top, height=height, width=width, where=where)
