"""What every reader checks before a sample leaves it: files are there and readable, text is there, masks fit and are not empty,
ids are not repeated.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from ans_core import rle
from ans_core.types import RLE, ImageRef


def image_size(image: ImageRef, *, where: str) -> tuple[int, int]:
    """(height, width) out of the file's header; the pixels are not read."""
    try:
        with Image.open(image if isinstance(image, Path) else io.BytesIO(image)) as opened:
            return opened.height, opened.width
    except FileNotFoundError as error:
        raise ValueError(f"{where}: image {image!s} does not exist; put the file there or correct the annotation's path") from error
    except (UnidentifiedImageError, OSError) as error:
        name = str(image) if isinstance(image, Path) else f"of {len(image)} embedded bytes"
        raise ValueError(f"{where}: image {name} can't be read ({error}); replace the file or leave the record out") from error


def mask(segmentation: object, *, height: int, width: int, where: str) -> RLE:
    """One object's mask: of the image's size, with at least one pixel."""
    made = rle.from_annotation(segmentation, height=height, width=width, where=where)
    if rle.area(made) == 0:
        raise ValueError(f"{where}: the mask has no pixel; draw it again or leave it out (no object at all: an empty list of masks)")
    return made


def text(value: object, *, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: the text is {value!r}; write what the mask shows or leave the record out")
    return value.strip()


def field(record: Any, key: str, *, where: str) -> Any:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with key {key!r}, found {type(record).__name__}")
    if key not in record:
        raise ValueError(f"{where}: key {key!r} is missing; the record has {sorted(record)}")
    return record[key]


def indexed(records: Iterable[dict[str, Any]], key: str, *, where: str) -> dict[Any, dict[str, Any]]:
    """By id; an id that comes twice is refused."""
    found: dict[Any, dict[str, Any]] = {}
    for record in records:
        name = field(record, key, where=where)
        if name in found:
            raise ValueError(f"{where}: {key} {name!r} comes twice; ids must be unique")
        found[name] = record
    return found


def load_json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; see docs/your-data.md for the files that each format has")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: line {error.lineno}, column {error.colno} is not JSON ({error.msg}); correct it or write the file again"
        ) from error


def load_json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, record) of every line that is not blank."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; see docs/your-data.md for the files that each format has")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                records.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}: line {number} is not JSON ({error.msg}); correct or remove this line") from error
    return records


def known_split(split: str, splits: Iterable[str], *, path: Path) -> None:
    names = sorted(set(splits))
    if split not in names:
        raise ValueError(f"{path} has no split {split!r}; it has {names}")


def image_folder(candidates: Iterable[Path], *, where: str) -> Path:
    """The first that exists."""
    tried = list(candidates)
    for folder in tried:
        if folder.is_dir():
            return folder
    raise ValueError(f"{where}: no folder of images; looked for {', '.join(map(str, tried))}; put (or link) the images at one of them")
