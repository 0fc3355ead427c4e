"""Flickr30k-GCG (`flickr_mergedGT_GCG_<split>.json`: COCO's layout; pictures have a caption, annotations
`tokens_positive` and `sam_mask`)
-> grounded_caption samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks, grounded
from ans_core.data.formats.files import ImageFolders, split_files
from ans_core.data.formats.media import Media
from ans_core.pictures import rle
from ans_core.types import Sample

FILES = ("flickr*_GCG_*.json",)
WORDS, SIDE = 3, 32
"""Upstream leaves out captions of fewer words and pictures with a shorter side."""


class Picture(checks.Record):
    id: checks.Id
    file_name: str
    caption: str
    height: int
    width: int


class Annotation(checks.Record):
    id: checks.Id
    image_id: checks.Id
    tokens_positive: checks.Filled[checks.Pair[int]]
    sam_mask: Any
    area: float | None = None
    ignore: bool | int = False


class Content(checks.Record):
    images: checks.Filled[Any]
    annotations: list[Any]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split. `path` is the folder or the file. Left out and counted: short captions, small pictures,
    captions without a mask."""
    file = split_files(path, FILES)[split]
    images = ImageFolders(file.parent, grounded.IMAGE_FOLDERS)
    faults = checks.Faults(file)
    content = checks.load(Content, file)
    images_by_id = checks.by_id(content.images, f"{file}: image")
    phrases = _by_image(content.annotations, images_by_id, file, faults)
    faults.usable = 0  # of the pictures
    for _, where, picture in faults.records(Picture, content.images, noun="image"):
        with faults:
            if len(picture.caption.split()) < WORDS or min(picture.height, picture.width) < SIDE:
                raise checks.Unusable(
                    f"a caption of fewer than {WORDS} words or a side of fewer than {SIDE} pixels"
                )
            checks.text(picture.caption, where)
            image = images.find(picture.file_name, where=where, stated=(picture.height, picture.width))
            caption_phrases = _phrases(phrases.pop(picture.id, []), picture.caption, image, faults)
            yield grounded.sample(picture.caption, caption_phrases, image=image, sample_id=str(picture.id))


def _by_image(
    values: list[Any], image_ids: Container[Any], file: Path, faults: checks.Faults
) -> dict[Any, list[tuple[str, Annotation]]]:
    """Return (place, annotation) by picture."""
    by_image: dict[Any, list[tuple[str, Annotation]]] = defaultdict(list)
    with faults:
        checks.by_id(values, f"{file}: annotation")
    for number, value in enumerate(values):
        with faults:
            where = f"{file}: annotation {number}"
            annotation = checks.record(Annotation, value, where)
            if annotation.image_id not in image_ids:
                raise checks.DataError(
                    f"{where}: image_id {rle.short(annotation.image_id)} is not among the images"
                )
            by_image[annotation.image_id].append((where, annotation))
    return by_image


def _phrases(
    annotations: list[tuple[str, Annotation]], caption: str, image: Media, faults: checks.Faults
) -> list[grounded.Phrase]:
    """Return one phrase per annotation, its first words; upstream, too, leaves out those to be ignored and
    those without an area."""
    phrases = []
    for where, annotation in annotations:
        if not annotation.ignore and (annotation.area is None or annotation.area > 0):
            positions = annotation.tokens_positive[0]
            start, end = grounded.span(positions, caption, where=f"{where}: tokens_positive")
            mask = image.usable_mask(annotation.sam_mask, where, faults=faults)
            phrases.append((start, end, [mask]))
    if not phrases:
        raise checks.Unusable("a caption without a mask")
    return phrases
