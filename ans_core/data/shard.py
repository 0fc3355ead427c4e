"""A data set of any format -> shards (ans_core/data/formats/shards.py): a few large files for a store, in place of millions of small
ones."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from ans_core.data.formats import FORMATS, SPLITS
from ans_core.data.formats.shards import digest_of
from ans_core.data.index import FIELDS, SampleIndex, by_picture, nameless_index
from ans_core.data.pictures import check_pictures
from ans_core.pictures import media, transforms
from ans_core.types import ImageRef, Sample, VideoFrame
from ans_core.written import atomic_folder

SHARD_BYTES = 256 << 20
"""A shard ends with the picture or clip that brings it to this size."""


def shard(path: Path, form: str, out: Path, *, split: str | None = None) -> list[str]:
    """Write a split (None: every one) into the new folder `out`; return lines that say what it holds. Raises DataError
    for faults of the set, and pictures that can't be decoded."""
    if out.exists():
        raise ValueError(f"{out} exists; give a new folder")
    lines = []
    with atomic_folder(out) as partial:
        for part in [split] if split else SPLITS[form](path):
            samples, shards = write(FORMATS[form](path, name="", split=part), partial / part)
            lines.append(f"{out / part}: {samples:,} samples in {shards} shards")
    return lines


def write(samples: Iterable[Sample], folder: Path) -> tuple[int, int]:
    """Write one split; return the number of samples and of shards. Samples about one picture stand together,
    in the order of the first. A video becomes its frames. Raises DataError for pictures that can't be decoded."""
    index = nameless_index(samples, dataset="", parent=folder)
    check_pictures(index, where=f"split {folder.name!r}")
    order, starts = by_picture(index.picture_keys)
    left, shards, written = len(starts) - 1, 0, index.digest()
    pictures = enumerate(pairwise(tqdm(starts.tolist(), desc=f"shard {folder.name}", mininterval=1)))
    while left:
        with tarfile.open(folder / f"{shards:06d}.tar", "w", format=tarfile.GNU_FORMAT) as tar:
            for key, (start, end) in pictures:
                left -= 1
                for name, content in _members(f"{key:09d}", index, order[start:end].tolist(), written):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                if tar.offset >= SHARD_BYTES:
                    break
        shards += 1
    return len(index), shards


def _members(key: str, samples: SampleIndex, numbers: list[int], written: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of a picture's or clip's files, and of the samples about it."""
    about = [samples[number] for number in numbers]
    frames = about[0].frames
    for place, frame in enumerate(frames):
        content = _content(frame)
        with Image.open(io.BytesIO(content)) as picture:
            kind = str(picture.format).lower()
        yield f"{key}.{place}.{kind}" if len(frames) > 1 else f"{key}.{kind}", content
    values = [
        {"number": number} | {field: getattr(sample, field) for field in FIELDS}
        for number, sample in zip(numbers, about, strict=True)
    ]
    record = {"total": len(samples), "written": written, "digest": digest_of(values), "samples": values}
    yield f"{key}.json", json.dumps(record).encode()


def _content(frame: ImageRef) -> bytes:
    if isinstance(frame, VideoFrame):
        frame = media.png(transforms.open_image(frame))
    return frame if isinstance(frame, bytes) else frame.read_bytes()
