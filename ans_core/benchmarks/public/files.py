"""Prediction and truth files as people publish them -> records and masks; whatever does not fit together is
refused here.

JSON or JSON lines, plain or .gz.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from ans_core import nearest_file
from ans_core.pictures import rle
from ans_core.types import RLE

SHOWN = 5
"""Names listed in an error."""
PICTURES = (".jpg", ".png", ".jpeg")


class Record(dict[str, Any]):
    """A JSON object that knows where it stands (file and line, record or id), which every refusal names."""

    def __init__(self, entries: Any, where: str) -> None:
        if not isinstance(entries, Mapping):
            raise ValueError(f"{where}: {type(entries).__name__}, not an object")
        super().__init__(entries)
        self.where = where

    def value(self, key: str) -> Any:
        if key not in self:
            raise ValueError(f"{self.where}: key {key!r} is missing; the record has {sorted(map(str, self))}")
        return self[key]

    def record(self, key: str) -> Record:
        """An object inside."""
        return Record(self.value(key), f"{self.where}, {key}")

    def records(self, key: str) -> list[Record]:
        """A list of objects inside."""
        return [Record(one, f"{self.where}, {key} {n}") for n, one in enumerate(self.listed(key))]

    def text(self, key: str) -> str:
        entry = self.value(key)
        if not isinstance(entry, str):
            raise ValueError(f"{self.where}: {key!r} is {type(entry).__name__} {str(entry)[:40]!r}, not text")
        return entry

    def listed(self, key: str, of: type = object) -> list[Any]:
        entries = self.value(key)
        if not isinstance(entries, list) or not all(isinstance(entry, of) for entry in entries):
            kind = f" of {of.__name__}" if of is not object else ""
            raise ValueError(f"{self.where}: {key!r} is {rle.short(entries)}, not a list{kind}")
        return entries

    def literal(self, key: str) -> list[str]:
        """The entries of a Python list that stands there as text."""
        source = self.text(key)
        try:
            entries = ast.literal_eval(source)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            entries = None  # what is not Python, or nested too deep
        if not isinstance(entries, list):
            raise ValueError(f"{self.where}: {key!r} is {rle.short(source)}, not the text of a Python list")
        return [str(entry) for entry in entries]

    def number(self, key: str) -> int | float:
        entry = self.value(key)
        if isinstance(entry, bool) or not isinstance(entry, int | float) or not math.isfinite(entry):
            raise ValueError(f"{self.where}: {key!r} is {rle.short(entry)}, not a finite number")
        return entry

    def verdict(self, key: str) -> bool:
        """Whether a judge, or a script, called an answer right."""
        entry = self.value(key)
        if entry not in (True, False, "1", "0"):  # 1 and 1.0 equal True
            raise ValueError(
                f"{self.where}: {key!r} is {rle.short(entry)}; write true or false, 1 or 0 (also as text), or "
                "leave it out"
            )
        return entry in (True, "1")

    def id_of(self, key: str) -> str:
        """As text, so that 7, 7.0 and "7" are one."""
        entry = self.value(key)
        if isinstance(entry, float) and entry.is_integer():
            return str(int(entry))
        if isinstance(entry, bool) or not isinstance(entry, str | int):
            raise ValueError(
                f"{self.where}: {key} {rle.short(entry)} is no id; an id is text or a whole number"
            )
        return str(entry)

    def size(self, key: str = "size") -> tuple[int, int]:
        """(height, width), which a record of masks states."""
        return mask_size({"size": self.value(key)}, where=self.where)

    def mask(self, key: str, size: Sequence[int]) -> RLE:
        return mask(self.value(key), size, where=self.where)

    def masklet(self, key: str, frames: Sequence[object], size: Sequence[int]) -> list[RLE]:
        """A mask, or null, for each of these frames."""
        masks = self.listed(key)
        if len(masks) != len(frames):
            raise ValueError(f"{self.where}: {len(masks)} masks of {key!r} for {len(frames)} frames")
        return [
            mask(one, size, where=f"{self.where}, frame {frame}")
            for one, frame in zip(masks, frames, strict=True)
        ]


def load(path: Path) -> Any:
    """A JSON value; of JSON lines, the list of them."""
    if ".jsonl" in path.suffixes:  # also of a single line
        return list(_lines(path))
    with _opened(path) as file:
        text = file.read()
    try:
        return _parsed(text, where=str(path))
    except json.JSONDecodeError:
        if "\n" not in text.strip():
            raise ValueError(f"{path}: neither JSON nor JSON lines") from None
    return list(_lines(path))


def stream(path: Path) -> Iterator[Record]:
    """Yield the records of a file; of JSON lines, one is in memory at a time."""
    loaded = _lines(path) if ".jsonl" in path.suffixes else load(path)
    if not isinstance(loaded, list | Iterator):
        raise ValueError(f"{path}: expected a list of records (or a record a line), found {_kind(loaded)}")
    for number, entry in enumerate(loaded):
        yield Record(entry, f"{path}, record {number}")


def records(path: Path) -> list[Record]:
    """All records of a file, at least one."""
    listed = list(stream(path))
    if not listed:
        raise ValueError(f"{path}: no records")
    return listed


def by_name(path: Path, what: str) -> dict[str, Any]:
    """The entries of a JSON object by their names. what: what it holds, for the refusal of anything else."""
    loaded = load(path)
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError(f"{path}: expected {what}, found {_kind(loaded)}")
    return loaded


def records_by_name(path: Path, what: str) -> dict[str, Record]:
    return {name: Record(entry, f"{path}, {name}") for name, entry in by_name(path, what).items()}


def _lines(path: Path) -> Iterator[Any]:
    """One value a line, read as they are asked for."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield _parsed(line, where=f"{path}, line {number}")
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from None


def _parsed(text: str, *, where: str) -> Any:
    """Raises JSONDecodeError, and ValueError for JSON that can be read in two ways or not at all."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _TwiceError as error:
        raise ValueError(f"{where}: key {error.args[0]!r} comes twice in one object; leave one") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deep") from None


class _TwiceError(Exception):
    """Its argument is the key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise _TwiceError(
            next(key for n, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:n]))
        )
    return record


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    packed = path.suffix == ".gz"
    try:
        with (
            io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig")
            if packed
            else path.open(encoding="utf-8-sig") as file
        ):
            yield file
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        form = "UTF-8 text in gzip" if packed else "UTF-8 text"
        raise ValueError(f"{path} is cut off or not {form} ({error}); get or write it again") from None


def _kind(value: Any) -> str:
    return (
        f"{len(value)} entries of {type(value).__name__}"
        if isinstance(value, list | dict)
        else type(value).__name__
    )


class Lines(Mapping[str, Record]):
    """The records of a JSON lines file by name. Only their places are in memory; a record is read when it is
    asked for."""

    def __init__(self, path: Path, name: Callable[[Record], str]) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}
        if path.suffix == ".gz":
            raise ValueError(
                f"{path}: its lines are read where they stand, one at a time; unpack it first (gunzip)"
            )
        with path.open("rb") as file:
            start = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        sample = name(Record(json.loads(line), "record"))
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number}: {error}") from None
                    if sample in self._places:
                        raise ValueError(
                            f"{path}, line {number}: {sample!r} comes twice; leave one prediction a sample"
                        )
                    self._places[sample] = (start, len(line))
                start += len(line)

    def line(self, name: str) -> bytes:
        start, length = self._places[name]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def __getitem__(self, name: str) -> Record:
        return Record(json.loads(self.line(name)), f"{self.path}, {name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def picture(folder: Path, stem: str, *, where: str) -> Path:
    """The picture of that name, with whichever suffix."""
    for suffix in PICTURES:
        if (path := folder / f"{stem}{suffix}").is_file():
            return path
    raise ValueError(
        f"{where}: no picture {folder / stem} ({', '.join(PICTURES)}){nearest_file.hint(folder / stem)}"
    )


def pictures(folder: Path, *names: str) -> Path:
    """The first of these folders (relative to `folder`) that is there."""
    for name in names:
        if (path := folder / name).is_dir():
            return path
    raise ValueError(
        f"{folder}: none of the folders {', '.join(names)} is there; put the pictures (or a link to them) "
        "into one of them"
    )


def pictures_named(names: Iterable[str], *folders: Path, where: Path) -> dict[str, Path]:
    """The picture of each name, in the first of these folders that has it; if any is missing, that is said
    before a model runs."""
    candidates = {name: [path for folder in folders if (path := folder / name).is_file()] for name in names}
    if absent := [name for name, paths in candidates.items() if not paths]:
        places = " or ".join(map(str, folders))
        nearest = nearest_file.hint(*(folder / absent[0] for folder in folders))
        raise ValueError(
            f"{where}: {len(absent)} of {len(candidates)} pictures are not in {places}: {shown(absent)}; put "
            f"them there{nearest}"
        )
    return {name: paths[0] for name, paths in candidates.items()}


def with_pictures(
    entries: Mapping[str, Record], key: str, *folders: Path, where: Path, inside: str = ""
) -> Iterator[tuple[str, Record, Path]]:
    """Yield (name, entry, picture), those of one picture in a row. key: of the picture's name in an entry,
    which may begin with the folder `inside`."""
    names = {name: entry.text(key).removeprefix(inside) for name, entry in entries.items()}
    paths = pictures_named(names.values(), *folders, where=where)
    for name, picture_name in sorted(names.items(), key=lambda pair: pair[1]):
        yield name, entries[name], paths[picture_name]


def named(folder: Path, *names: str) -> Path:
    """The file of that name in `folder` (or with .gz), or `folder` itself where it is a file."""
    if folder.is_file():
        return folder
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise ValueError(f"{folder}: none of {', '.join(names)} (or .gz) is there")


def by_id(rows: Iterable[Any], key: str, *, where: object) -> dict[str, Record]:
    """Records by their ids, which name them from then on. An id that comes twice is refused."""
    table: dict[str, Record] = {}
    for row in rows:
        name = Record(row, str(where)).id_of(key)
        if name in table:
            raise ValueError(f"{where}: {key} {name!r} comes twice; leave one prediction a sample")
        table[name] = Record(row, f"{where}, {name}")
    return table


def refuse_unknown(predicted: Iterable[str], true: Iterable[str], *, where: Path, what: str) -> list[str]:
    """Raises ValueError for predictions of what the truth does not have; returns what is missing, in the
    truth's order."""
    true_names, predicted_names = list(true), set(predicted)
    if unknown := sorted(predicted_names - set(true_names)):
        raise ValueError(
            f"{where}: {len(unknown)} {what} that the truth does not have: {shown(unknown)}; is this "
            "another split's file?"
        )
    missing = [name for name in true_names if name not in predicted_names]
    if len(missing) == len(true_names):
        raise ValueError(f"{where}: no prediction for any of the {len(true_names)} {what}")
    return missing


def shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def refuse_same(predictions: Path, truth: Path | None) -> None:
    """Public scorers give 1.0 to a truth path in the place of the predictions'."""
    for path in (predictions, truth):
        if path is not None and not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if truth is not None and predictions.samefile(truth):
        raise ValueError(
            f"--predictions and --data are both {predictions}: the truth would be scored against itself; "
            "give the file of the predictions"
        )


def mask(annotation: object, size: Sequence[int], *, where: str) -> RLE:
    """None = empty. RLE or polygons of exactly that size (height, width)."""
    height, width = size
    if annotation is None:
        return rle.empty(height, width)
    return rle.from_annotation(annotation, height=height, width=width, where=where)


def mask_size(annotation: object, *, where: str) -> tuple[int, int]:
    """(height, width) of an RLE."""
    size = annotation.get("size") if isinstance(annotation, dict) else None
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise ValueError(
            f"{where}: a mask is {rle.short(annotation)}, not an RLE with its size [height, width]"
        )
    return size[0], size[1]


def index_masks(folder: Path, frames: Sequence[str]) -> list[UInt8[np.ndarray, "H W"]]:
    """The PNGs of these frames (names without suffix)."""
    if absent := [f"{frame}.png" for frame in frames if not (folder / f"{frame}.png").is_file()]:
        raise ValueError(f"{folder}: {len(absent)} of {len(frames)} frames are not there: {shown(absent)}")
    return [index_mask(folder / f"{frame}.png") for frame in frames]


def index_mask(path: Path) -> UInt8[np.ndarray, "H W"]:
    """A PNG of object numbers (palette or grey): 0 background, 255 void."""
    try:
        with Image.open(path) as picture:
            if picture.mode not in ("P", "L", "1"):
                raise ValueError(
                    f"{path}: mode {picture.mode}; a mask is a PNG of one 8-bit channel (palette or grey)"
                )
            return np.asarray(picture).astype(np.uint8)
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path}: can't be read ({error})") from error
