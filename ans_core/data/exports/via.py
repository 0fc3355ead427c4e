"""VGG Image Annotator's JSON (a project, or its exported annotations; versions 1 and 2) or CSV -> records."""

from __future__ import annotations

import csv
import json
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from ans_core.data.exports.labelled import (
    TEXTS,
    Export,
    Point,
    Shape,
    clipped,
    corners,
    each,
    ellipse,
    find,
    split_of,
)
from ans_core.data.formats import checks
from ans_core.data.formats.media import Media, upright_picture
from ans_core.pictures import rle

CORNERS = {
    "polygon": ("all_points_x", "all_points_y"),
    "rect": ("x", "y", "width", "height"),
    "circle": ("cx", "cy", "r"),
    "ellipse": ("cx", "cy", "rx", "ry"),
}
LABELS = ("label", "name", "class", "category", "type", "object")
"""Names of the attribute that is the label, where a region has several."""


def read(place: Path, file: Path) -> Export:
    """A region's label is its one attribute, or the one of LABELS; attributes of TEXTS are texts about it.
    Pictures are beside the file or in `images/`."""
    content = _of_csv(file) if file.suffix.lower() == ".csv" else checks.load_json(file)
    pictures = content.get("_via_img_metadata", content)

    def read_picture(keyed: tuple[str, Any], export: Export) -> None:
        key, value = keyed
        where = f"{file}: {rle.short(key)}"
        regions = value.get("regions") if isinstance(value, dict) else None
        if not isinstance(regions, list | dict) or not isinstance(value.get("filename"), str):
            raise checks.DataError(f"{where}: no picture with filename and regions, but {rle.short(value)}")
        if not regions:
            export.left_out["pictures without a region"] += 1
            return
        path = find([file.parent / "images", file.parent], value["filename"], where=where)
        picture = upright_picture(path, where)
        shapes = []
        # a dict: version 1
        for number, region in enumerate(regions.values() if isinstance(regions, dict) else regions):
            with export.faults:
                if shape := _shape(region, picture, export, f"{where}, region {number}"):
                    shapes.append(shape)
        export.add(path, shapes, split=split_of(path, place))

    return each(file, pictures.items(), read_picture)


def _of_csv(file: Path) -> dict[str, Any]:
    """Return the rows, one a region, as the exported JSON has them."""
    pictures: dict[str, Any] = {}
    text = checks.load_text(file).removeprefix("#")  # version 1 writes #filename
    header = text.partition("\n")[0]
    # a spreadsheet may have saved it with semicolons
    rows = csv.DictReader(StringIO(text), delimiter=";" if header.count(";") > header.count(",") else ",")
    try:
        for row in rows:
            picture = pictures.setdefault(row["filename"], {"filename": row["filename"], "regions": []})
            shape, attributes = (
                json.loads(row[f"region_{part}"]) for part in ("shape_attributes", "attributes")
            )
            if shape:  # {}: a picture without a region
                picture["regions"].append({"shape_attributes": shape, "region_attributes": attributes})
    except (KeyError, TypeError, ValueError) as error:
        raise checks.DataError(
            f"{file}: line {rows.line_num} has no filename, region_shape_attributes and region_attributes in JSON "
            f"({error}); export it again"
        ) from None
    return pictures


def _shape(region: Any, picture: Media, export: Export, where: str) -> Shape | None:
    if not isinstance(region, dict) or not isinstance(geometry := region.get("shape_attributes"), dict):
        raise checks.DataError(f"{where} is {rle.short(region)}, without shape_attributes")
    kind = str(geometry.get("name"))
    if kind not in CORNERS:
        export.without_pixels(kind)
        return None
    values = [geometry.get(key) for key in CORNERS[kind]]
    try:
        points = _points(kind, values)
    except (TypeError, ValueError):
        raise checks.DataError(
            f"{where}: {kind} has {CORNERS[kind]} = {rle.short(values)}, which are not numbers"
        ) from None
    # VIA keeps polygons inside: points far outside are of another picture
    polygons = [[*chain.from_iterable(points)]] if kind == "polygon" else clipped(points, picture)
    mask = export.mask(polygons, picture, where)
    attributes = {
        str(key).strip(): text
        for key, value in (region.get("region_attributes") or {}).items()
        if (text := _text(value))
    }
    texts = tuple((key.lower(), text) for key, text in attributes.items() if key.lower() in TEXTS)
    named = (
        [text for key, text in attributes.items() if key.lower() in LABELS]
        if len(attributes) > 1
        else list(attributes.values())
    )
    if not named and not texts:
        raise checks.DataError(
            f"{where}: which of its attributes {sorted(attributes)} is the label? Name it `label`, or a "
            "text about the object `text`"
        )
    label = "" if texts else checks.text(named[0], f"{where}, label")
    return Shape(mask=mask, label=label, texts=texts) if mask else None


def _points(kind: str, values: list[Any]) -> list[Point]:
    if kind == "polygon":
        return [(float(x), float(y)) for x, y in zip(*values, strict=True)]
    x, y, *sizes = map(float, values)
    if kind == "rect":
        wide, high = sizes
        return corners(x, y, x + wide, y + high)
    return ellipse(x, y, sizes[0], sizes[-1])


def _text(value: Any) -> str:
    """Return a text, or the options of a checkbox that are ticked."""
    if isinstance(value, dict):
        value = ", ".join(str(option) for option, ticked in value.items() if ticked)
    return str(value).strip()
