"""LLaVA's conversations about a picture, or a list of them (LLaVA-Instruct-150K, mix665k: image, conversations)
-> conversation samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.data.formats import checks
from ans_core.data.formats.files import ImageFolders, split_files
from ans_core.data.formats.turns import Turn, conversation, exchanges
from ans_core.types import Sample

FILES = ("llava_*.json", "*instruct*.json", "*mix*.json")
IMAGE_FOLDERS = ("images", "../images", "../llava_images", "../llava_images/coco/train2017", ".")
"""Relative to the annotations; upstream's data tree has the third, with coco/train2017/... in it."""


class Record(checks.Record):
    conversations: list[Turn]
    image: str | list[str] | None = None


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split: one sample per conversation, whose last turn is the question. `path` is the folder or
    the file.

    Left out and counted: records without a picture (a twentieth of mix665k; a row of training is a picture
    with its questions), and those of which turns.py can make no conversation.
    """
    file = split_files(path, FILES)[split]
    images, faults = ImageFolders(file.parent, IMAGE_FOLDERS), checks.Faults(file)
    for number, where, record in faults.records(Record):
        with faults:
            names = [record.image] if isinstance(record.image, str) else record.image
            if not names:
                raise checks.Unusable("text alone, without a picture")
            pairs = exchanges(record.conversations, pictures=len(names))
            shown = images.all_of(names, where=where)
            yield conversation(pairs, shown, sample_id=str(number), image_id="+".join(names))
