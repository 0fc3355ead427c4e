"""ViRL39K (a *.parquet of questions, pictures in `images/`) -> a conversation a question.

The release is one training set. One picture in 50, chosen by a hash of its name, is held out: questions that show
such a picture, alone or among others, are `val`. Questions without a picture are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks
from ans_core.data.formats.files import ImageFolders, parquet_files, parquet_table
from ans_core.metrics.answers import final
from ans_core.types import Sample

FILES = "*.parquet"
HELD_OUT = 50
"""One picture in so many."""


class Record(checks.Record):
    qid: str
    question: str
    answer: str
    category: str = ""
    image: list[str] | None = None


def held_out(images: Sequence[str]) -> bool:
    """Whether one of a question's pictures is held out, so that the question may not be trained on."""
    return any(
        int.from_bytes(hashlib.sha256(image.encode()).digest()[:8], "big") % HELD_OUT == 0 for image in images
    )


def read(path: Path, *, split: str) -> Iterator[Sample]:
    files = parquet_files(path, FILES, release="ViRL39K")
    images, faults = ImageFolders(files[0].parent, (".",)), checks.Faults(path)
    for file in files:
        for value in _rows(file):
            with faults:
                where = f"{file}: question {value.get('qid')}"
                record = checks.record(Record, value, where)
                shown = record.image or []
                if not shown:
                    raise checks.Unusable("no picture")
                if held_out(shown) == (split == "val"):
                    yield _sample(record, images, where)
    faults.tell()


def splits(path: Path) -> list[str]:
    parquet_files(path, FILES, release="ViRL39K")
    return ["train", "val"]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with parquet_table(file) as table:
        for batch in table.iter_batches(batch_size=512):
            yield from batch.to_pylist()


def _sample(record: Record, images: ImageFolders, where: str) -> Sample:
    names = record.image or []
    return images.all_of(names, where=where).sample(
        sample_id=record.qid,
        image_id="+".join(names),
        task="conversation",
        question=checks.text(checks.named_pictures([record.question], len(names))[0], where),
        text=checks.text(final(record.answer), where),
        meta={"category": record.category},
    )
