"""COCO's instances (`instances_<split>2017.json`: images, annotations, categories) -> one referring sample per picture and category.

The category's name is the expression, and means all its objects. A crowd (`iscrowd`: many objects in one mask) counts as one more object,
as it is of the category too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ans_core import rle
from ans_core.data.formats import checks
from ans_core.data.formats.files import ImageFolders, split_file, split_files
from ans_core.data.formats.skipped import Skipped, usable_mask
from ans_core.types import RLE, Sample

FILES = ("instances*.json", "annotations/instances*.json")
YEAR = slice(len("instances_"), None)
"""Part of a file's name that names its folder of pictures: instances_train2017.json belongs to train2017."""


class Picture(checks.Record):
    id: checks.Id
    file_name: str
    height: int | None = None
    width: int | None = None


class Annotation(checks.Record):
    image_id: checks.Id
    category_id: checks.Id
    segmentation: Any
    iscrowd: int = 0


class Category(checks.Record):
    id: checks.Id
    name: str


class Content(checks.Record):
    images: Annotated[list[Any], Field(min_length=1)]
    annotations: Annotated[list[Any], Field(min_length=1)]
    categories: Annotated[list[Any], Field(min_length=1)]


def read(path: Path, *, name: str, split: str) -> Iterator[Sample]:
    """Read one split. `path` is the folder or the file. Left out and counted: objects without a pixel, and pictures without an object."""
    file = split_file(path, FILES, split=split)
    own = file.stem[YEAR]
    folders = [file.parent / up / part for up in (".", "..") for part in (own, f"images/{own}", "images", own.rstrip("0123456789"))]
    return instances(file, ImageFolders([*folders, file.parent], where=str(path)), name=name)


def instances(
    file: Path, images: ImageFolders, *, name: str, text: Callable[[str], str] = str, located: Callable[[str], str] = str
) -> Iterator[Sample]:
    """Read a file in COCO's form. `text`: a category's name -> the expression. `located`: `file_name` -> where the picture lies."""
    content = checks.record(Content, checks.load_json(file), where=str(file))
    known = checks.by_id(content.images, "id", where=f"{file}: image")
    names = _names(content.categories, file)
    faults, skipped = checks.Faults(file), Skipped(file)
    objects: dict[tuple[Any, Any], list[tuple[RLE, bool]]] = {}
    for number, value in enumerate(content.annotations):
        with faults, skipped:
            where = f"{file}: annotation {number}"
            annotation = checks.record(Annotation, value, where=where)
            for key, ids in (("image_id", known), ("category_id", names)):
                if getattr(annotation, key) not in ids:
                    raise checks.DataError(f"{where}: {key} {rle.short(getattr(annotation, key))} is in no list of the file")
            picture = checks.record(Picture, known[annotation.image_id], where=f"{file}: image {rle.short(annotation.image_id)}")
            _, height, width = images.find(located(picture.file_name), where=where, stated=(picture.height, picture.width))
            mask = usable_mask(annotation.segmentation, height=height, width=width, where=where)
            objects.setdefault((annotation.image_id, annotation.category_id), []).append((mask, bool(annotation.iscrowd)))
    faults.tell()
    skipped.tell()
    for (image_id, category_id), found in objects.items():
        picture = checks.record(Picture, known[image_id], where=f"{file}: image {rle.short(image_id)}")
        image, height, width = images.find(located(picture.file_name), where=str(file), stated=(picture.height, picture.width))
        yield Sample(
            sample_id=f"{image_id}_{category_id}",
            dataset=name,
            image_id=str(image_id),
            frames=(image,),
            height=height,
            width=width,
            task="referring",
            text=text(names[category_id]),
            masks=tuple((mask,) for mask, _ in found),
            meta={"category": names[category_id], "kind": "crowd" if any(crowd for _, crowd in found) else "instances"},
        )


def splits(path: Path) -> list[str]:
    return list(split_files(path, FILES))


def _names(categories: list[Any], file: Path) -> dict[Any, str]:
    checks.by_id(categories, "id", where=f"{file}: category")
    read = [checks.record(Category, value, where=f"{file}: category {number}") for number, value in enumerate(categories)]
    return {category.id: checks.text(category.name, where=f"{file}: category {rle.short(category.id)}") for category in read}
