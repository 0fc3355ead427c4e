"""Prediction and truth files as people publish them -> records and masks; whatever does not fit together is refused here.

JSON or JSON lines, plain or .gz.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from ans_core import rle
from ans_core.types import RLE

SHOWN = 5
"""Names listed in an error."""


def load(path: Path) -> Any:
    """A JSON value; of JSON lines, the list of them."""
    with _open(path) as file:
        text = file.read()
    try:
        return json.loads(text)
    except ValueError:
        if "\n" not in text.strip():
            raise ValueError(f"{path}: neither JSON nor JSON lines") from None
    return list(lines(path))


def lines(path: Path) -> Iterator[Any]:
    """One value a line, read as they are asked for."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from None


def records(path: Path) -> list[dict[str, Any]]:
    """A list of JSON objects, at least one."""
    found = load(path)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}: expected a list of records (or a record a line), found {_kind(found)}")
    for number, record in enumerate(found, start=1):
        if not isinstance(record, dict):
            raise ValueError(f"{path}: record {number} is {_kind(record)}, not an object")
    return found


def _open(path: Path) -> io.TextIOWrapper:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return io.TextIOWrapper(gzip.open(path), encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _kind(value: Any) -> str:
    return f"{len(value)} entries of {type(value).__name__}" if isinstance(value, list | dict) else type(value).__name__


def named(folder: Path, *names: str) -> Path:
    """The file of that name in `folder` (or with .gz), or `folder` itself where it is a file."""
    if folder.is_file():
        return folder
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise ValueError(f"{folder}: none of {', '.join(names)} (or .gz) is there")


def value(record: Mapping[str, Any], key: str, *, where: str) -> Any:
    if key not in record:
        raise ValueError(f"{where}: key {key!r} is missing; the record has {sorted(map(str, record))}")
    return record[key]


def text(record: Mapping[str, Any], key: str, *, where: str) -> str:
    found = value(record, key, where=where)
    if not isinstance(found, str):
        raise ValueError(f"{where}: {key!r} is {type(found).__name__} {str(found)[:40]!r}, not text")
    return found


def by_id(found: Iterable[dict[str, Any]], key: str, *, where: str) -> dict[str, dict[str, Any]]:
    """Ids as text, so that 7 and "7" are one; an id that comes twice is refused."""
    table: dict[str, dict[str, Any]] = {}
    for record in found:
        name = str(value(record, key, where=where))
        if name in table:
            raise ValueError(f"{where}: {key} {name!r} comes twice; leave one prediction a sample")
        table[name] = record
    return table


def refuse_unknown(predicted: Iterable[str], true: Iterable[str], *, where: Path, what: str) -> list[str]:
    """Raises ValueError for predictions of what the truth does not have; returns what is missing, in the truth's order."""
    known, given = list(true), set(predicted)
    if unknown := sorted(given - set(known)):
        raise ValueError(f"{where}: {len(unknown)} {what} that the truth does not have: {shown(unknown)}; is this another split's file?")
    missing = [name for name in known if name not in given]
    if len(missing) == len(known):
        raise ValueError(f"{where}: no prediction for any of the {len(known)} {what}")
    return missing


def shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def refuse_same(predictions: Path, truth: Path | None) -> None:
    """Public scorers give 1.0 to a truth path in the place of the predictions'."""
    for path in (predictions, truth):
        if path is not None and not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if truth is not None and predictions.resolve() == truth.resolve():
        raise ValueError(f"--predictions and --data are both {predictions}: the truth would be scored against itself")


def mask(found: object, *, height: int, width: int, where: str) -> RLE:
    """None = empty. RLE or polygons of exactly that size."""
    if isinstance(found, dict) and not isinstance(found.get("counts", ""), str | bytes | list):
        raise ValueError(f"{where}: counts of an RLE are text or a list of run lengths, got {type(found['counts']).__name__}")
    if found is None:
        return rle.empty(height, width)
    made = rle.from_annotation(found, height=height, width=width, where=where)
    if run_total(made["counts"]) != height * width:  # pycocotools would read beyond the mask
        raise ValueError(f"{where}: the RLE's counts are no run lengths of {height} x {width} pixels")
    return made


def run_total(counts: str) -> int | None:
    """Sum of a compressed RLE's run lengths; None where it is no such code (COCO: 5 bits a letter from "0", bit 6 = more to come, sign at
    the end, from the fourth on the difference to the run before the last)."""
    letters = np.frombuffer(counts.encode("latin-1", "replace"), np.uint8).astype(np.int64) - 48
    if not len(letters) or letters.min() < 0 or letters.max() > 63 or letters[-1] & 32:
        return None
    ends = np.flatnonzero(letters & 32 == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(letters)) - np.repeat(starts, ends - starts + 1)
    if place.max() > 7:
        return None
    runs = np.add.reduceat((letters & 31) << (5 * place), starts)
    runs -= np.where(letters[ends] & 16, np.int64(1) << (5 * (ends - starts + 1)), 0)
    for first in (1, 2):
        runs[first::2] = np.cumsum(runs[first::2])
    return int(runs.sum()) if runs.min() >= 0 else None


def index_mask(path: Path) -> UInt8[np.ndarray, "H W"]:
    """A PNG of object numbers (palette or grey): 0 background, 255 void."""
    try:
        with Image.open(path) as picture:
            if picture.mode not in ("P", "L", "1"):
                raise ValueError(f"{path}: mode {picture.mode}; a mask is a PNG of one 8-bit channel (palette or grey)")
            return np.asarray(picture).astype(np.uint8)
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path}: can't be read ({error})") from error
