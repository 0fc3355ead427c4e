"""Exports that training can read as they are (COCO instances, upstream's fine-tuning file) -> the same
records."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import cast

from ans_core.data.exports.labelled import (
    NO_PIXEL,
    Export,
    ImportedTask,
    Labelled,
    picture_folders,
    split_of_file,
)
from ans_core.data.formats import checks, coco, plain
from ans_core.data.formats.files import ImageFolders
from ans_core.types import Sample


def coco_file(place: Path, file: Path) -> Export:
    """A category's name is the text, and means all its objects in the picture. Splits come from the names of
    the file and its folders."""
    images = ImageFolders(Path(), picture_folders(file))
    faults = checks.Faults(file)
    samples = list(coco.instances(file, images, faults=faults))
    split = split_of_file(file, place)
    export = Export(file=file, labelled=[_labelled(sample, split) for sample in samples])
    content = checks.load_json(file)
    lost = {
        NO_PIXEL: faults.unusable.total(),
        "pictures without an object": len(
            {posixpath.normpath(str(image.get("file_name"))) for image in content["images"]}
        )
        - len({sample.image_id for sample in samples}),
    }
    export.left_out.update({reason: count for reason, count in lost.items() if count})
    return export


def finetune_file(place: Path, file: Path) -> Export:
    """Upstream's masks are of the stored pixels."""
    samples = [sample for split in plain.splits(file) for sample in plain.read(file, split=split)]
    return Export(file=file, labelled=[_labelled(sample, None) for sample in samples], masks_upright=False)


def _labelled(sample: Sample, split: str | None) -> Labelled:
    (picture,) = sample.frames
    masks = [mask for (mask,) in sample.masks if mask is not None]
    return Labelled(
        picture=cast(Path, picture),
        text=sample.text,
        masks=masks,
        task=cast(ImportedTask, sample.task),
        split=split,
    )
