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
    split_of_file,
)
from ans_core.data.formats import checks
from ans_core.data.formats.media import Media, picture_of
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
    images = checks.by_id(content.get("images", []), f"{file}: image")
    names = checks.by_id(content.get("categories", []), f"{file}: category")
    folders = picture_folders(file)
    segments = [file.with_suffix(""), file.parent.parent / file.stem, file.parent]
    export, split = Export(file=file), split_of_file(file, place)
    for _, where, annotation in export.faults.records(Annotation, content["annotations"], noun="annotation"):
        with export.faults:
            image = _listed(images, "image_id", annotation.image_id, where)
            path = find(folders, str(image.get("file_name")), where=where)
            picture = picture_of(path, where, stated=(image.get("height"), image.get("width")))
            ids = _ids(find(segments, annotation.file_name, where=where), picture, where)
            shapes = []
            for part in annotation.segments_info:
                segment = checks.record(Segment, part, where)
                category = _listed(names, "category_id", segment.category_id, where)
                label = checks.text(category.get("name"), f"{file}: category {segment.category_id}")
                if mask := export.mask(rle.encode(ids == segment.id), picture, where):
                    shapes.append(Shape(mask=mask, label=label))
            export.add(path, shapes, split=split)
    return export


def _listed(by_id: dict[Any, Any], key: str, number: Any, where: str) -> Any:
    if number not in by_id:
        raise checks.DataError(f"{where}: {key} {rle.short(number)} is in no list of the file")
    return by_id[number]


def _ids(file: Path, picture: Media, where: str) -> Int64[np.ndarray, "H W"]:
    picture_of(file, where, stated=picture.size)
    with Image.open(file) as opened:
        return colour_codes(opened)
