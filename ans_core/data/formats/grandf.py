"""Grounded captions in GranD-f's layout, which is OpenPSG-GCG's too (`*<split>.json`: file_name, caption,
groundings) -> grounded_caption samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks, grounded
from ans_core.data.formats.files import ImageFolders, split_files
from ans_core.data.formats.media import Media
from ans_core.pictures import rle
from ans_core.types import Sample

FILES = ("*train.json", "*val.json", "*test.json")
PUBLISHED = "GCG"
"""Part of the names of the published files (GranDf_HA_GCG_train.json, OpenPsgGCG_train.json), whose captions
are detailed ones."""


class Grounding(checks.Record):
    token_positives: checks.Pair[int]
    """[start, end) characters of the caption."""
    rle_masks: checks.Filled[Any]


class Caption(checks.Record):
    file_name: str
    caption: str
    groundings: dict[str, Grounding | None]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split. `path` is the folder, or a file in it (a published folder holds several sets)."""
    file = split_files(path, FILES)[split]
    images = ImageFolders(file.parent, grounded.IMAGE_FOLDERS)
    detail, faults = PUBLISHED in file.name, checks.Faults(file)
    for number, where, record in faults.records(Caption):
        with faults:
            caption = grounded.caption_of(record.caption, where=where)
            image = images.find(record.file_name, where=where)
            phrases = _phrases(record, caption, image, where)
            yield grounded.sample(caption, phrases, image=image, sample_id=str(number), detail=detail)


def _phrases(record: Caption, caption: str, image: Media, where: str) -> list[grounded.Phrase]:
    phrases = []
    for phrase, grounding in record.groundings.items():
        if grounding is not None:
            here = f"{where}, phrase {rle.short(phrase)}"
            start, end = grounded.span(grounding.token_positives, caption, where=f"{here}: token_positives")
            phrases.append((start, end, [image.mask(m, here) for m in grounding.rle_masks]))
    return phrases
