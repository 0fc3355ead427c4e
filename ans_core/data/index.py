"""An index on disk of one split of a data set: samples in, a sequence out that reads single samples from a
file.

A list of a million samples takes 2 GB, and every loader process gets a copy of what it touches. An index
takes a file descriptor and memory-mapped arrays, which processes share. `records.jsonl` has one sample a
line; records are read by `pread`, whose pages the system may drop at any time.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jaxtyping import Int

from ans_core import types
from ans_core.code_hash import CodeHashes
from ans_core.data import outlines
from ans_core.fingerprint import files_of
from ans_core.lazy import Lazy
from ans_core.storage import is_url
from ans_core.types import FilePart, ImageRef, Sample, VideoFrames
from ans_core.written import atomic_folder

RECORDS, STAMP = "records.jsonl", "stamp.json"
COLUMNS = {
    "ends": "i8",
    "picture_keys": "S16",
    "tasks": "S18",
    "things": "S16",
    "outlines": "u2",
    "unnamed": "i4",
}
"""Values of every sample, a file `<name>.npy` each: its end in RECORDS, and what ans_core/data/outlines.py makes of it."""
SHARD = ".tar"
FIELDS = tuple(field.name for field in fields(Sample) if field.name not in {"dataset", "frames"})


Stamp = dict[str, str]
"""What an index was made of; a different stamp makes it anew."""


def stamp_of(path: Path, *, format: str, name: str, split: str, files: str) -> Stamp:
    return {
        "format": format,
        "path": str(path.resolve()),
        "name": name,
        "split": split,
        "files": files,
        "code": _code_hash(),
    }


class SampleIndex(Lazy[Sample]):
    """The samples of an index, read one by one. Open it before loader processes are started: they share its
    file descriptor."""

    ends: np.ndarray
    picture_keys: np.ndarray
    """Samples with equal keys show the same frames."""
    tasks: np.ndarray
    things: np.ndarray
    outlines: np.ndarray
    unnamed: np.ndarray

    def __init__(self, folder: Path) -> None:
        self.dataset: str = json.loads((folder / STAMP).read_text(encoding="utf-8"))["name"]
        for column in COLUMNS:
            setattr(self, column, np.load(folder / f"{column}.npy", mmap_mode="r"))
        self._records = (folder / RECORDS).open("rb", buffering=0)

    def __len__(self) -> int:
        return len(self.ends)

    def item(self, number: int) -> Sample:
        start = int(self.ends[number - 1]) if number else 0
        return decode(
            os.pread(self._records.fileno(), int(self.ends[number]) - start, start), dataset=self.dataset
        )

    def digest(self) -> str:
        """Hash all records."""
        hashed, place = hashlib.blake2b(digest_size=16), 0
        while chunk := os.pread(self._records.fileno(), 1 << 24, place):
            hashed.update(chunk)
            place += len(chunk)
        return hashed.hexdigest()


def write_index(folder: Path, stamp: Stamp, read: Callable[[], Iterable[Sample]]) -> None:
    """Write what `read` returns to the index in `folder`, unless one of this stamp is there. One process writes,
    others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if _stamp_in(folder) != stamp:
            with atomic_folder(folder) as partial:  # whoever has the old one open keeps reading it
                _write_records(partial, read())
                (partial / STAMP).write_text(json.dumps(stamp), encoding="utf-8")


def nameless_index(samples: Iterable[Sample], *, dataset: str, parent: Path) -> SampleIndex:
    """Index samples for as long as the sequence is in use; its files take disk space in the folder `parent`,
    but no name there."""
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix=".index-") as name:
        folder = Path(name)
        _write_records(folder, samples)
        (folder / STAMP).write_text(json.dumps({"name": dataset}), encoding="utf-8")
        return SampleIndex(folder)


def encode(sample: Sample) -> bytes:
    """Write a sample as one line of JSON: the values of FIELDS."""
    frames = (
        [_encode_ref(ref) for ref in sample.frames]
        if isinstance(sample.frames, tuple)
        else _encode_ref(sample.frames)
    )
    values = [getattr(sample, name) for name in FIELDS]
    return json.dumps([frames, *values], separators=(",", ":")).encode("ascii") + b"\n"


def decode(record: bytes, *, dataset: str) -> Sample:
    frames, *values = json.loads(record)
    plain = {name: tuples(value) for name, value in zip(FIELDS, values, strict=True)}
    shown = tuple(map(_decode_ref, frames)) if isinstance(frames, list) else _decode_ref(frames)
    return Sample(dataset=dataset, frames=shown, **plain)


def tuples(value: Any) -> Any:
    """Turn JSON's lists into tuples, but not in a mapping (a mask, `meta`)."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def picture_key(sample: Sample) -> tuple[object, ...]:
    """Return a key of the pictures themselves, so that data sets with the same files (or the same embedded
    pictures) share rows."""
    if isinstance(sample.frames, VideoFrames):
        return _place(sample.frames.file), sample.frames.indices
    return tuple(map(_picture, sample.frames))


def picture_keys(samples: Sequence[Sample]) -> np.ndarray:
    """Return every sample's `picture_key` as 16 bytes, an array of dtype S16."""
    if isinstance(samples, SampleIndex):
        return samples.picture_keys
    return np.array([picture_digest(sample) for sample in samples], dtype="S16")


def tasks(samples: Sequence[Sample]) -> np.ndarray:
    """Return every sample's task, an array of byte strings."""
    return (
        samples.tasks
        if isinstance(samples, SampleIndex)
        else np.array([sample.task for sample in samples], dtype="S")
    )


def by_picture(keys: np.ndarray) -> tuple[Int[np.ndarray, " samples"], Int[np.ndarray, " bounds"]]:
    """Group samples by their pictures' keys: return (order, starts) such that picture i has the samples
    `order[starts[i] : starts[i + 1]]`. Pictures are in the order of their first samples, a picture's samples
    in their own order."""
    _, firsts, groups = np.unique(keys, return_index=True, return_inverse=True)
    places = np.empty(len(firsts), dtype=np.int64)
    places[np.argsort(firsts)] = np.arange(len(firsts))
    pictures = places[groups]
    return np.argsort(pictures, kind="stable"), np.concatenate(
        [[0], np.cumsum(np.bincount(pictures, minlength=len(firsts)))]
    )


def picture_digest(sample: Sample) -> bytes:
    """Return the 16 bytes that stand for `picture_key`."""
    return _digest(repr(picture_key(sample)).encode())


def _picture(ref: ImageRef) -> object:
    match ref:
        case Path():
            return _place(ref)
        case bytes():
            return _digest(ref)
        case FilePart(length=None):
            return ref.file
        case FilePart(file=file) if str(file).endswith(SHARD):  # which holds each picture once
            return str(file), ref.start
        case FilePart():
            return _digest(ref.read_bytes())
    return ref


def _place(file: Path) -> str:
    """Return one name for a file, however its data set writes it: relative, with `..`, through a linked
    folder."""
    return f"{_folder(str(file.parent))}/{file.name}"


_folder = functools.lru_cache(maxsize=4096)(os.path.realpath)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _encode_ref(ref: Any) -> str | list[str] | dict[str, Any]:
    """Write a file as its name, an embedded picture as base64, a place in a larger file (a class of
    ans_core/types.py) by its fields."""
    if isinstance(ref, Path):
        return str(ref)
    if isinstance(ref, bytes):
        return [base64.b64encode(ref).decode("ascii")]
    return {"type": type(ref).__name__} | {
        field.name: _encode_field(getattr(ref, field.name)) for field in fields(ref)
    }


def _encode_field(value: Path | str | int | range | None) -> str | int | list[int] | None:
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    return str(value) if isinstance(value, Path) else value


def _decode_ref(value: str | list[str] | dict[str, Any]) -> Any:
    if isinstance(value, str):
        return Path(value)
    if isinstance(value, list):
        return base64.b64decode(value[0])
    return getattr(types, value.pop("type"))(**{name: _decode_field(field) for name, field in value.items()})


def _decode_field(value: str | int | list[int] | None) -> Path | str | int | range | None:
    if isinstance(value, list):
        return range(*value)
    return Path(value) if isinstance(value, str) and not is_url(value) else value


def _write_records(folder: Path, samples: Iterable[Sample]) -> None:
    columns = {name: folder / f"{name}.raw" for name in COLUMNS}  # in memory, ten million take a gigabyte
    with ExitStack() as stack:
        file = stack.enter_context((folder / RECORDS).open("wb"))
        files = [stack.enter_context(path.open("wb")) for path in columns.values()]
        for sample in samples:
            file.write(encode(sample))
            picture = picture_digest(sample)
            values = (
                file.tell(),
                picture,
                sample.task,
                outlines.thing_of(sample, picture),
                outlines.outline_of(sample),
                len(outlines.unnamed_regions(sample)),
            )
            for column, kind, value in zip(files, COLUMNS.values(), values, strict=True):
                column.write(np.array(value, dtype=kind).tobytes())
    for name, path in columns.items():
        np.save(folder / f"{name}.npy", np.fromfile(path, dtype=COLUMNS[name]))
        path.unlink()


def _stamp_in(folder: Path) -> Any:
    """Return the stamp of a complete index, None if there is none or it was damaged by hand."""
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def hash_files(path: Path) -> str:
    """Hash the names, sizes and times of last change of `files_of(path)`."""
    digest = hashlib.sha256()
    for name, size, changed_ns in sorted(files_of(path)):
        digest.update(f"{name}\0{size} {changed_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


@functools.cache
def _code_hash() -> str:
    """Hash the code that reads and checks data, also what of it stands elsewhere, as the masks' coding."""
    return CodeHashes(Path(__file__).parents[2]).hash_of((__package__,))
