"""Label Studio's JSON -> records: brush masks, polygons, rectangles and ellipses, with labels and texts of
each region."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import numpy as np
from jaxtyping import UInt8

from ans_core.data.exports.labelled import (
    SUFFIXES,
    TEXTS,
    Export,
    Shape,
    clipped,
    corners,
    each,
    ellipse,
    find,
    turned,
)
from ans_core.data.formats import checks
from ans_core.data.formats.media import Media, picture_of
from ans_core.pictures import rle


def read(place: Path, file: Path) -> Export:
    """Read the format `JSON` (not JSON-MIN, which has no sizes). Pictures are in `images/` beside it, or
    beside it, also by the names that uploading gave them. Of several annotations of a task the ground truth
    counts; without one the task is a fault."""
    return each(file, enumerate(checks.load_list(file)), _task)


def _task(numbered: tuple[int, Any], export: Export) -> None:
    number, task = numbered
    file = export.file
    where = f"{file}: task {task.get('id', number) if isinstance(task, dict) else number}"
    if not isinstance(task, dict) or not isinstance(task.get("data"), dict):
        raise checks.DataError(f"{where}: no task with data; export as JSON, not JSON-MIN or CSV")
    done = [one for one in _objects(task, "annotations", where=where) if not one.get("was_cancelled")]
    chosen = [one for one in done if one.get("ground_truth")] or done
    if len(chosen) > 1:
        raise checks.DataError(
            f"{where}: {len(chosen)} annotations; mark one of them as ground truth, or delete the others"
        )
    results = _objects(chosen[0], "result", where=f"{where}, annotation") if chosen else []
    if not results:
        export.left_out["tasks without an annotation"] += 1
        return
    name = _picture_name(task["data"], results, where)
    picture = find([file.parent / "images", file.parent], name, where=where)
    regions: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        regions.setdefault(str(result.get("id")), []).append(result)
    shapes = []
    for name, parts in regions.items():
        with export.faults:
            if shape := _shape(parts, picture, export, f"{where}, region {name}"):
                shapes.append(shape)
    export.add(picture, shapes, split=None)


def _objects(holder: dict[str, Any], key: str, *, where: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects; a missing one is empty."""
    objects = holder.get(key, [])
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise checks.DataError(
            f"{where}: {key} is {rle.short(objects)}, not a list of objects; export it again"
        )
    return objects


def _texts(value: Any, where: str) -> list[str]:
    """Return the texts of a text area: a list, or one by itself."""
    return [checks.text(text, f"{where}, text") for text in (value if isinstance(value, list) else [value])]


def _picture_name(data: dict[str, Any], results: list[dict[str, Any]], where: str) -> str:
    """Return the picture's path from the task's data: under the only key, `image`, or the one whose value
    looks like a picture."""
    values = {key: value for key, value in data.items() if isinstance(value, str)}
    pictures = [
        value
        for value in values.values()
        if Path(urlparse(value).path + urlparse(value).query).suffix.lower() in SUFFIXES
    ]
    name = values.get("image") or (pictures[0] if len(pictures) == 1 else None)
    if not name:
        raise checks.DataError(f"{where}: which of its data {sorted(data)} is the picture? Name it `image`")
    address = urlparse(name)
    local = parse_qs(address.query).get("d")  # /data/local-files/?d=path
    return unquote(local[0] if local else address.path)


def _shape(parts: list[dict[str, Any]], picture: Path, export: Export, where: str) -> Shape | None:
    """Return the object that the results with one id describe; None if they draw nothing, which is counted."""
    if not all(isinstance(part.get("value", {}), dict) for part in parts):
        raise checks.DataError(
            f"{where}: value is {[rle.short(part.get('value')) for part in parts]}, not an object; export "
            "it again"
        )
    values = {key: value for part in parts for key, value in part.get("value", {}).items()}
    drawing = next(
        (part for part in parts if {"rle", "points", "radiusX", "x"} & part.get("value", {}).keys()), None
    )
    if drawing is None or str(drawing.get("type")).startswith(("keypoint", "vector", "relation")):
        export.without_pixels(", ".join(sorted({str(part.get("type")) for part in parts})))
        return None
    if drawing.get("image_rotation"):
        raise checks.DataError(
            f"{where}: drawn on a picture turned by {drawing['image_rotation']} degrees; turn the file "
            "itself instead"
        )
    stated = (drawing.get("original_height"), drawing.get("original_width"))
    media = picture_of(picture, where, stated=stated)
    mask = export.mask(_segmentation(values, media, where), media, where)
    if mask is None:
        return None
    labels = [
        label
        for key, value in values.items()
        if key.endswith("labels") and isinstance(value, list)
        for label in value
    ]
    texts = tuple(
        (str(part.get("from_name", "")).lower(), text)
        for part in parts
        if part.get("type") == "textarea"
        for text in _texts(part.get("value", {}).get("text", []), where)
    )
    recognised = tuple((name, text) for name, text in texts if name in TEXTS)
    if len(labels) > 1 or not (labels or recognised):
        fields = sorted({name for name, _ in texts})
        raise checks.DataError(
            f"{where}: labels {labels} and texts of {fields}; an object needs one label, or a text area of "
            f"{sorted(TEXTS)}"
        )
    return Shape(
        mask=mask, label=checks.text(labels[0], f"{where}, label") if labels else "", texts=recognised
    )


def _segmentation(value: dict[str, Any], picture: Media, where: str) -> object:
    """Coordinates are percent of the picture's sides; a rectangle turns around its upper left corner, an
    ellipse around its centre."""
    if "rle" in value:
        return rle.encode(brush(value["rle"], height=picture.height, width=picture.width, where=where))
    across, down = picture.width / 100, picture.height / 100
    try:
        if "points" in value:
            points = [(x * across, y * down) for x, y in value["points"]]
        else:
            start = x, y = value["x"] * across, value["y"] * down
            if "radiusX" in value:
                points = ellipse(x, y, value["radiusX"] * across, value["radiusY"] * down)
            else:
                points = corners(x, y, x + value["width"] * across, y + value["height"] * down)
            points = turned(points, start, float(value.get("rotation", 0)))
        return clipped(points, picture)
    except (KeyError, TypeError, ValueError) as error:
        raise checks.DataError(
            f"{where}: no rectangle, polygon, ellipse or brush ({error!r}): {rle.short(value)}"
        ) from None


def brush(content: Any, *, height: int, width: int, where: str) -> np.ndarray:
    """Decode Label Studio's own compression of an RGBA picture (thi.ng/rle-pack) and return where alpha is
    not 0.

    A stream of bits: 32 the number of values, 5 the bits of a value less 1, four times 4 the bits of a run's
    length less 1; then runs: a bit that tells one value repeated from values one by one, 2 bits that choose
    the bits of the length, the length less 1, the value(s).
    """
    if not isinstance(content, list) or not all(
        isinstance(byte, int) and 0 <= byte < 256 for byte in content
    ):
        raise checks.DataError(f"{where}: rle is {rle.short(content)}, not a list of bytes")
    stream = StringIO("".join(f"{byte:08b}" for byte in content))

    def read_bits(count: int) -> int:
        if len(bits := stream.read(count)) < count:
            raise EOFError("it ends too early")
        return int(bits, 2)

    try:
        total, size = read_bits(32), read_bits(5) + 1
        if total != height * width * 4:
            raise checks.DataError(
                f"{where}: its rle has {total} values; RGBA of {width} x {height} pixels has "
                f"{height * width * 4}"
            )
        lengths = [read_bits(4) + 1 for _ in range(4)]
        values: UInt8[np.ndarray, " total"] = np.zeros(total, np.uint8)
        place = 0
        while place < total:
            repeated = read_bits(1)
            end = place + 1 + read_bits(lengths[read_bits(2)])
            values[place:end] = read_bits(size) if repeated else [read_bits(size) for _ in range(end - place)]
            place = end
    except (EOFError, ValueError) as error:
        if isinstance(error, checks.DataError):
            raise
        raise checks.DataError(f"{where}: its rle is cut or garbled ({error}); export it again") from None
    mask: np.ndarray = values.reshape(height, width, 4)[:, :, 3] > 0
    return mask
