"""Shards of a data set (`<split>/000000.tar`, ..., or `<split>.url` for a folder of them elsewhere) -> the samples of
the set that they were made of, in its order. Pictures stay where they are in the tar files.

The files are those of webdataset: the members of a picture or clip have one key, as 000000012.jpg (of a clip,
000000012.0.jpg, 000000012.1.jpg, ...), and last comes 000000012.json, with the samples about it. (The package
webdataset reads such files one after the other; it has no places in them.)
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from ans_core import storage
from ans_core.data.formats import checks
from ans_core.data.formats.files import url_of
from ans_core.data.index import FIELDS, tuples
from ans_core.data.parallel import in_order
from ans_core.types import FilePart, Sample

NEW_FIELDS = {"stills"}
"""Which older shards lack: the defaults are right for them."""
MANY = 100
"""Shards for whose parsing processes start."""
MOST = 8
"""Shards parsed at a time: their records are held, which are a tenth of their bytes (COCO) up to twice as many."""
LAYOUT = "<split>/*.tar and no <split>.url; `ans data shard` writes shards"


class Samples(checks.Record):
    """What a member .json holds."""

    total: int
    """Samples of the split."""
    written: str = ""
    """What tells one writing of the split from others; older shards have none."""
    digest: str
    """Of the samples, as `digest_of` makes it."""
    samples: list[dict[str, Any]]
    """Each with its place in the split, `number`."""


def digest_of(samples: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.blake2b(json.dumps(samples).encode(), digest_size=16).hexdigest()


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split. A sample waits in memory for those before it, where the shards have its picture earlier."""
    faults = checks.Faults(path)
    due, total, count, written = 0, None, 0, None
    early: list[tuple[int, int, Sample]] = []
    shards = _shards(path / split)
    for shard, (members, fault) in zip(
        shards, in_order(_parse, shards, many=MANY, what=str(path / split), most=MOST), strict=True
    ):
        with faults:
            for frames, content in members:
                if content.written != (written := content.written if written is None else written):
                    raise checks.DataError(
                        f"{shard} was not written together with {shards[0]}; copy the shards of one `ans data "
                        "shard` into an empty folder"
                    )
                total = content.total
                for values in content.samples:
                    if (values.keys() ^ {"number", *FIELDS}) - NEW_FIELDS:
                        raise checks.DataError(
                            f"{shard}: a sample has the keys {sorted(values)}; write the shards again"
                        )
                    sample = Sample(
                        frames=frames, **{key: tuples(values[key]) for key in FIELDS if key in values}
                    )
                    heappush(early, (values["number"], len(early), sample))
                    count += 1
                while early and early[0][0] <= due:
                    number, _, sample = heappop(early)
                    if number < due:
                        raise checks.DataError(
                            f"{shard}: sample {number} comes twice; leave one copy of its shard"
                        )
                    yield sample
                    due += 1
            if fault is not None:
                raise fault
    faults.tell()
    if due != total:
        raise checks.DataError(
            f"{path}, split {split!r}: {count} of {total} samples are there, and the first that is lost is number {due}; copy "
            f"its shards again: {missing(shards) or 'the last ones'}"
        )


def missing(shards: Sequence[Path | str]) -> str:
    """Return the names that the shards' numbers lack."""
    names = {str(shard).rpartition("/")[2] for shard in shards}
    return ", ".join(name for n in range(len(names)) if (name := f"{n:06d}.tar") not in names)


def splits(path: Path) -> list[str]:
    """Raises DataError for a folder without shards beside others."""
    found = {file.parent.name for file in path.glob("*/*.tar")} | {file.stem for file in path.glob("*.url")}
    for folder in sorted(path.glob("[!.]*/")):
        if found and folder.name not in found:
            raise checks.DataError(
                f"{folder} has no shard (*.tar); copy its shards again, or remove the folder"
            )
    return sorted(found)


def _shards(folder: Path) -> Sequence[Path | str]:
    pattern = url_of(folder, "*.tar")
    try:
        shards = storage.matching(pattern) if pattern else sorted(folder.glob("*.tar"))
    except OSError as error:
        raise checks.DataError(f"{pattern} can't be listed: {error}") from None
    if not shards:
        raise checks.DataError(f"{pattern or folder} has no shard")
    return shards


def _parse(
    shard: Path | str,
) -> tuple[list[tuple[tuple[FilePart, ...], Samples]], checks.DataError | None]:
    """Return the pictures of every key with the samples about them, up to the shard's fault if it has one."""
    members: list[tuple[tuple[FilePart, ...], Samples]] = []
    frames: list[FilePart] = []
    try:
        opened: Any = storage.opened(shard) if isinstance(shard, str) else shard.open("rb")
        with opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                if not member.name.endswith(".json"):
                    frames.append(FilePart(file=shard, start=member.offset_data, length=member.size))
                    continue
                content = json.load(tar.extractfile(member) or io.BytesIO())
                record = checks.record(Samples, content, f"{shard}: {member.name}")
                if record.digest != digest_of(record.samples):
                    raise checks.DataError(f"{shard}: {member.name} is not as it was written; copy it again")
                members.append((tuple(frames), record))
                frames = []
            opened.seek(tar.offset)
            if opened.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise checks.DataError(f"{shard} is cut; copy it again")
    except checks.DataError as error:
        return members, error
    except (OSError, tarfile.TarError, ValueError, KeyError, RecursionError) as error:
        return members, checks.DataError(f"{shard} can't be read ({error}); copy it again")
    return members, None
