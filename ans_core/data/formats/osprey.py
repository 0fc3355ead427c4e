"""Osprey-724K (file_name, annotation, and conversations or description) -> conversations about regions, and
detailed region captions.

Its five files: osprey_conversation, osprey_detail_description, osprey_part_level, osprey_short_form,
osprey_lvis_positive_negative.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core import prompts
from ans_core.data.formats import checks
from ans_core.data.formats.files import ImageFolders, split_files
from ans_core.data.formats.media import Media
from ans_core.data.formats.plain import REGION
from ans_core.data.formats.turns import Turn, conversation, exchanges
from ans_core.types import RLE, Sample

FILES = ("osprey_*.json",)
SHORT_FORM = "short_form"
"""Part of the name of the file whose questions are to be answered by a word or a phrase."""
IMAGE_FOLDERS = (
    "../coco/train2014", "../coco/val2014", "../coco/train2017", "../coco/val2017", "../coco/imgs", "images",
    "../images",
)  # fmt: skip
"""Relative to the annotations. The first four are upstream's data tree."""
MARKED = re.compile(r"<\s*reg(?:io|i)n\s*(?:of\s*)?(\d+)[>\]]?", re.IGNORECASE)
"""`<region1>`, and what the published files have in its place: `<region1]`, `<region 1>`, `<regin1>`,
`<Region1>`."""
DESCRIBED = re.compile(r"region(\d+)\s*:\s*(.+)", re.DOTALL)
"""One description: `<region1>: A man in ...`, its brackets taken out."""


class Region(checks.Record):
    segmentation: Any


class Record(checks.Record):
    file_name: str
    height: int
    width: int
    annotation: checks.Filled[Region]
    conversations: list[Turn] | None = None
    description: list[str] | None = None


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read the only split, "train". `path` is the file, or its folder if there is one in it.

    Left out and counted: records that speak of a region which they don't have, or with a mask of no pixel,
    and those of which turns.py can
    make no conversation.
    """
    file = split_files(path, FILES)[split]
    images, faults = ImageFolders(file.parent, IMAGE_FOLDERS), checks.Faults(file)
    for number, where, record in faults.records(Record):
        with faults:
            if (record.conversations is None) == (record.description is None):
                raise checks.DataError(
                    f"{where}: it has to have one of the keys conversations and description"
                )
            image = images.find(record.file_name, where=where, stated=(record.height, record.width))
            masks = [
                image.usable_mask(r.segmentation, f"{where}, annotation {i}", faults=faults)
                for i, r in enumerate(record.annotation)
            ]
            if record.conversations is not None:
                end = prompts.SHORT_ANSWER if SHORT_FORM in file.name else ""
                yield _conversation(record.conversations, masks, image, sample_id=str(number), end=end)
            else:
                yield from _captions(
                    record.description or [], masks, image, sample_id=str(number), where=where
                )


def _conversation(turns: list[Turn], masks: list[RLE], image: Media, *, sample_id: str, end: str) -> Sample:
    pairs = [
        (_words(question, len(masks)) + end, _words(answer, len(masks)))
        for question, answer in exchanges(turns)
    ]
    masklets = tuple((mask,) for mask in masks)
    return conversation(pairs, image, sample_id=sample_id, image_id=image.stem, masks=masklets)


def _words(text: str, regions: int) -> str:
    """Call regions region1, region2, ...; angle brackets go, as upstream takes them out."""
    words = MARKED.sub(r"region\1", text).replace("<", "").replace(">", "")
    if not set(REGION.findall(words)) <= {str(number) for number in range(1, regions + 1)}:
        raise checks.Unusable("words about a region that is not there")
    return words


def _captions(
    descriptions: list[str], masks: list[RLE], image: Media, *, sample_id: str, where: str
) -> list[Sample]:
    """Make one caption per description, of the region whose number it begins with, without that beginning."""
    samples = []
    for number, description in enumerate(descriptions):
        match = DESCRIBED.fullmatch(_words(description, len(masks)).strip())
        if match is None:
            raise checks.Unusable("a description that does not begin with `<region1>: `")
        samples.append(
            image.sample(
                sample_id=f"{sample_id}_{number}",
                image_id=image.stem,
                task="region_caption",
                text=checks.text(match[2], f"{where}, description {number}"),
                masks=((masks[int(match[1]) - 1],),),
                detail=True,
            )
        )
    if not samples:
        raise checks.Unusable("no description")
    return samples
