"""SA-1B (`sa_000000/sa_1.jpg` beside `sa_1.json`: image, annotations) -> one sample a picture with all of its
masks.

The masks have no names: the samples are of task `tracking`, for SAM2's memory and for questions whose answer
a mask gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks, clip_files, files
from ans_core.data.formats.media import picture_of
from ans_core.pictures import rle
from ans_core.types import Sample

PATTERN = "sa_*.json"
LAYOUT = f"{PATTERN}; give the folder of SA-1B's archives, unpacked"


class Picture(checks.Record):
    image_id: int
    width: int
    height: int
    file_name: str


class Annotation(checks.Record):
    id: int
    segmentation: Any


class Content(checks.Record):
    image: Picture
    annotations: list[Annotation]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read the only split, "train". Left out and counted: pictures without a mask; of a picture, masks
    without a pixel."""
    faults = checks.Faults(path)
    for file in sorted(path.rglob(PATTERN)):
        with faults:
            sample = _sample(file)
            faults.once(f"picture {sample.image_id}", where=str(file))
            yield sample
    faults.tell()


def splits(path: Path) -> list[str]:
    return ["train"] if next(path.rglob(PATTERN), None) else []


def _sample(file: Path) -> Sample:
    content = checks.load(Content, file)
    stated = (content.image.height, content.image.width)
    image = files.file_of(file.parent, content.image.file_name, where=str(file))
    picture = picture_of(image, str(file), stated=stated)
    checks.once((f"{file}: annotation {annotation.id}", annotation.id) for annotation in content.annotations)
    masks = {}
    for annotation in content.annotations:
        mask = picture.some_mask(annotation.segmentation, f"{file}: annotation {annotation.id}")
        if rle.area(mask):
            masks[annotation.id] = (mask,)
    if not masks:
        raise checks.Unusable("no mask")
    return clip_files.tracking_sample(str(content.image.image_id), masks, picture)
