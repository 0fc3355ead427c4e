"""RefCOCOg-GCG (`RefCOCOg_GCG_<split>.json`: a list of {id: {img_file_name, caption, refs}}) ->
grounded_caption samples.

A phrase is the words of an expression, where the caption first has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ans_core.data.formats import checks, grounded
from ans_core.data.formats.files import ImageFolders, split_files
from ans_core.data.formats.media import Media
from ans_core.types import Sample

FILES = ("RefCOCOg_GCG_*.json",)


class Ref(checks.Record):
    sentence: str
    segmentation: Any


class Caption(checks.Record):
    img_file_name: str
    caption: str
    refs: list[Ref]


class Entry(checks.Record):
    record: Annotated[dict[str, Any], Field(min_length=1, max_length=1)]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split. `path` is the folder or the file. Left out and counted: captions that hold no
    expression's words."""
    file = split_files(path, FILES)[split]
    images = ImageFolders(file.parent, grounded.IMAGE_FOLDERS)
    faults = checks.Faults(file)
    for number, value in enumerate(checks.load_list(file)):
        with faults:
            where = f"{file}: record {number}"
            ((sample_id, inner),) = checks.record(Entry, {"record": value}, where).record.items()
            where = f"{where} (id {sample_id[:60]})"
            record = checks.record(Caption, inner, where)
            caption = grounded.caption_of(record.caption, where=where).lower()
            image = images.find(record.img_file_name, where=where)
            phrases = _phrases(record.refs, caption, image, where, faults=faults)
            yield grounded.sample(caption, phrases, image=image, sample_id=f"{number}_{sample_id}")
    faults.tell()


def _phrases(
    refs: list[Ref], caption: str, image: Media, where: str, *, faults: checks.Faults
) -> list[grounded.Phrase]:
    phrases = []
    for number, ref in enumerate(refs):
        here = f"{where}, ref {number}"
        words = checks.text(ref.sentence, here).lower()
        mask = image.usable_mask(ref.segmentation, here, faults=faults)
        if (start := caption.find(words)) >= 0:
            phrases.append((start, start + len(words), [mask]))
    if not phrases:
        raise checks.Unusable("a caption that holds the words of no expression")
    return phrases
