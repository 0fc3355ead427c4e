"""COCO's panoptic JSON (`segments_info`, and PNGs of segment ids) -> records: a category's name means all its
segments in the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from PIL import Image

from ans_core.data.exports.labelled import (
    Export,
    Shape,
    colour_codes,
    find,
    picture_folders,
    records,
    split_of_file,
)
from ans_core.data.formats import checks
from ans_core.pictures import rle


class Annotation(checks.Record):
    image_id: checks.Id
    file_name: str
    segments_info: list[Any]


class Segment(checks.Record):
    id: int
    category_id: checks.Id


def read(place: Path, file: Path) -> Export:
    """PNGs are in the folder of the file's name, as published, or beside it. A segment's id is R + 256 G +
    65,536 B."""
    content = checks.load_json(file)
    images = checks.by_id(content.get("images", []), "id", where=f"{file}: image")
    names = checks.by_id(content.get("categories", []), "id", where=f"{file}: category")
    folders = picture_folders(file)
    segments = [file.with_suffix(""), file.parent.parent / file.stem, file.parent]
    export, faults = Export(file=file), checks.Faults(file)
    for number, value in enumerate(content["annotations"]):
        with faults:
            where = f"{file}: annotation {number}"
            annotation = checks.record(Annotation, value, where=where)
            if annotation.image_id not in images:
                raise checks.DataError(
                    f"{where}: image_id {rle.short(annotation.image_id)} is in no list of the file"
                )
            image = images[annotation.image_id]
            picture = find(folders, str(image.get("file_name")), where=where)
            height, width = checks.image_size(
                picture, where=where, stated=(image.get("height"), image.get("width"))
            )
            ids = _ids(find(segments, annotation.file_name, where=where), height, width, where=where)
            shapes = []
            for part in annotation.segments_info:
                segment = checks.record(Segment, part, where=where)
                if segment.category_id not in names:
                    raise checks.DataError(
                        f"{where}: category_id {rle.short(segment.category_id)} is in no list of the file"
                    )
                label = checks.text(
                    names[segment.category_id].get("name"), where=f"{file}: category {segment.category_id}"
                )
                if mask := export.mask(
                    rle.encode(ids == segment.id), height=height, width=width, where=where
                ):
                    shapes.append(Shape(mask=mask, label=label))
            export.labelled += records(picture, shapes, split=split_of_file(file, place))
    faults.tell()
    return export


def _ids(file: Path, height: int, width: int, *, where: str) -> Int64[np.ndarray, "H W"]:
    checks.image_size(file, where=where, stated=(height, width))
    with Image.open(file) as picture:
        return colour_codes(picture)
