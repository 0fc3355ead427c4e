"""Read a prepared folder (`datasets.json`, written by the stage `prepare`) and return its data sets as
Samples."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote

from tqdm import tqdm

from ans_core import dist
from ans_core.data import splits
from ans_core.data.formats import FORMATS
from ans_core.data.index import SampleIndex, hash_files, stamp_of, write_index
from ans_core.data.mixture import Source
from ans_core.types import Sample

Kind = Literal["referring", "region_caption", "grounded_caption", "video", "masks", "phrases", "extra"]
"""The role of a data set in the mixture; masks: drawn things without words, and phrases: words for them
without masks, which have no share of it; extra: a user's own data set, with samples of any task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetEntry:
    """One split of one data set, as stages see it. `path` is relative to the prepared folder; for kind
    "extra" it is as in the settings (relative to the working folder)."""

    name: str
    format: str
    path: str
    split: str
    kind: Kind
    repeats: int = 1
    parts: tuple[str, ...] = ()
    """The set's own splits (names and patterns) that `split` consists of; empty: the one of its name."""
    hold_out: float = 0.0
    """Share of the pictures that are the split "val" of a set that has none; the others are "train"."""

    @property
    def on_disk(self) -> str | tuple[str, ...]:
        return self.parts or self.split


def write_entries(prepared: Path, entries: Collection[DatasetEntry]) -> None:
    (prepared / "datasets.json").write_text(
        json.dumps([_record(e) for e in entries], indent=1) + "\n", encoding="utf-8"
    )


def _record(entry: DatasetEntry) -> dict[str, object]:
    return {key: value for key, value in asdict(entry).items() if key not in ("parts", "hold_out") or value}


def read_entries(
    prepared: Path, split: str | None = None, kinds: Collection[str] | None = None
) -> list[DatasetEntry]:
    """Return the entries of a split (None: all) and of some kinds (None: all), in the order they were
    written."""
    if unknown := set(kinds or ()) - set(get_args(Kind)):
        raise ValueError(f"no kinds of data {sorted(unknown)}; there are {list(get_args(Kind))}")
    file = prepared / "datasets.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; run the stage `prepare` first")
    records = json.loads(file.read_text(encoding="utf-8"))
    entries = [DatasetEntry(**record | {"parts": tuple(record.get("parts", ()))}) for record in records]
    return [e for e in entries if split in (None, e.split) and (kinds is None or e.kind in kinds)]


def read_entry(prepared: Path, entry: DatasetEntry) -> Sequence[Sample]:
    """Read a data set as `read` does."""
    (samples,) = read(prepared, [entry])
    return samples


def read(
    prepared: Path, entries: Sequence[DatasetEntry], *, desc: str | None = None
) -> list[Sequence[Sample]]:
    """Read each data set once, into an index beside the prepared folder, and again when its files change. The
    first process looks at the files, once for all splits and all processes, which must call this together. Paths of
    pictures are absolute, so that a set is read from every working folder. desc: of a progress bar; None shows none."""

    def write() -> None:
        files = functools.cache(hash_files)
        for entry in tqdm(entries, desc=desc, disable=not desc or not entries):
            _write_index(prepared, entry, files)

    dist.after_the_first(write)
    return [SampleIndex(_index_folder(prepared, entry)) for entry in entries]


def _write_index(prepared: Path, entry: DatasetEntry, files: Callable[[Path], str]) -> None:
    place = Path(entry.path) if entry.kind == "extra" else prepared / entry.path
    path = existing(entry.format, place, name=entry.name).absolute()
    split = ", ".join(entry.parts) or entry.split
    split = f"{entry.split} of {split}, hold_out {entry.hold_out:g}" if entry.hold_out else split
    stamp = stamp_of(path, format=entry.format, name=entry.name, split=split, files=files(path))
    write_index(_index_folder(prepared, entry), stamp, lambda: _read(entry, path))


def _index_folder(prepared: Path, entry: DatasetEntry) -> Path:
    return prepared.with_name("index") / quote(f"{entry.name}-{entry.split}", safe="")


def samples_of(entry: DatasetEntry) -> Iterator[Sample]:
    """Read a data set of the user's without an index. Raises DataError naming the wrong file and record."""
    return _read(entry, existing(entry.format, Path(entry.path), name=entry.name))


def _read(entry: DatasetEntry, path: Path) -> Iterator[Sample]:
    """Read a split; with `hold_out` the part of "train", or of the parts that stand for it, that is this
    split."""
    on_disk = entry.parts or ("train" if entry.hold_out else entry.split)
    for sample in splits.read(entry.format, path, name=entry.name, split=on_disk):
        if not entry.hold_out or is_held_out(sample.image_id, share=entry.hold_out) == (entry.split == "val"):
            yield sample


def is_held_out(image: str, *, share: float) -> bool:
    """Tell whether a picture belongs to this share, by a hash of its name alone: more data never moves a
    picture."""
    return int(hashlib.sha256(image.encode()).hexdigest(), 16) % 10_000 < round(share * 10_000)


def read_samples(*, format: str, path: Path, name: str, split: str | Sequence[str]) -> list[Sample]:
    """Read a split, or several as one, of a data set of any format; ValueError names the wrong file and
    record."""
    folder = existing(format, path, name=name)
    return list(splits.read(format, folder, name=name, split=split))


def existing(format: str, path: Path, *, name: str) -> Path:
    """Return the path; ValueError if there is no such format or file."""
    if format not in FORMATS:
        raise ValueError(
            f"data set {name!r}: no format {format!r}; ans_core/data/formats has {sorted(FORMATS)}"
        )
    if not path.exists():
        raise ValueError(f"data set {name!r}: {path} does not exist; correct its path in params.yaml")
    return path


def sources(prepared: Path, split: str, kinds: Collection[str] | None = None) -> list[Source]:
    """Return the data sets of a split as sources of a mixture."""
    entries = read_entries(prepared, split, kinds)
    return [
        Source(name=e.name, kind=e.kind, samples=samples, repeats=e.repeats)
        for e, samples in zip(entries, read(prepared, entries), strict=True)
    ]


def of_kind(loaded: Collection[Source], kind: str) -> list[Sample]:
    return [sample for source in loaded if source.kind == kind for sample in source.samples]
