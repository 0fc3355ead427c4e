"""COCO's instances (`instances_<split>2017.json`: images, annotations, categories) -> one referring sample per picture and category.

The category's name is the expression, and means all its objects. A crowd (`iscrowd`: many objects in one mask) counts as one more object,
as it is of the category too; `meta["joined"]` names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ans_core import rle
from ans_core.data.formats import checks
from ans_core.data.formats.files import ImageFolders, split_file, split_files
from ans_core.data.formats.skipped import Skipped, usable_mask
from ans_core.types import RLE, Sample

FILES = ("instances*.json", "annotations/instances*.json", "_annotations.coco.json", "*/_annotations.coco.json")
"""As published, and as Roboflow exports it: a folder a split."""
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
    bbox: Any = None
    iscrowd: int = 0


class Category(checks.Record):
    id: checks.Id
    name: str


class Content(checks.Record):
    images: Annotated[list[Any], Field(min_length=1)]
    annotations: Annotated[list[Any], Field(min_length=1)]
    categories: Annotated[list[Any], Field(min_length=1)]


def read(path: Path, *, name: str, split: str, rectangles: bool = False) -> Iterator[Sample]:
    """Read one split. `path` is the folder or the file. Left out and counted: objects without a pixel, and pictures without an object.

    rectangles: a box is the mask of an object whose segmentation is empty, as tools write it that drew a rectangle.
    """
    file = split_file(path, FILES, split=split)
    own = file.stem[YEAR]
    folders = [file.parent / up / part for up in (".", "..") for part in (own, f"images/{own}", "images", own.rstrip("0123456789"))]
    return instances(file, ImageFolders([*folders, file.parent], where=str(path)), name=name, rectangles=rectangles)


def instances(
    file: Path,
    images: ImageFolders,
    *,
    name: str,
    text: Callable[[str], str] = str,
    located: Callable[[str], str] = str,
    rectangles: bool = False,
) -> Iterator[Sample]:
    """Read a file in COCO's form. `text`: a category's name -> the expression. `located`: `file_name` -> where the picture lies."""
    content = checks.record(Content, checks.load_json(file), where=str(file))
    known = checks.by_id(content.images, "id", where=f"{file}: image")
    names = _names(content.categories, file)
    faults, skipped = checks.Faults(file), Skipped(file)
    for numbers in _by_image(content.annotations):
        objects: dict[Any, list[tuple[RLE, bool]]] = {}
        for number in numbers:
            with faults, skipped:
                where = f"{file}: annotation {number}"
                annotation = checks.record(Annotation, content.annotations[number], where=where)
                for key, ids in (("image_id", known), ("category_id", names)):
                    if getattr(annotation, key) not in ids:
                        raise checks.DataError(f"{where}: {key} {rle.short(getattr(annotation, key))} is in no list of the file")
                picture = checks.record(Picture, known[annotation.image_id], where=f"{file}: image {rle.short(annotation.image_id)}")
                image, height, width = images.find(located(picture.file_name), where=where, stated=(picture.height, picture.width))
                shape = _corners(annotation.bbox, where=where) if rectangles and annotation.segmentation == [] else annotation.segmentation
                mask = usable_mask(shape, height=height, width=width, where=where)
                objects.setdefault(annotation.category_id, []).append((mask, bool(annotation.iscrowd)))
        for category_id, found in objects.items():
            crowds = [place for place, (_, crowd) in enumerate(found) if crowd]
            yield Sample(
                sample_id=f"{picture.id}_{category_id}",
                dataset=name,
                image_id=str(picture.id),
                frames=(image,),
                height=height,
                width=width,
                task="referring",
                text=text(names[category_id]),
                masks=tuple((mask,) for mask, _ in found),
                meta={"category": names[category_id], "kind": "crowd" if crowds else "instances"} | ({"joined": crowds} if crowds else {}),
            )
    faults.tell()
    skipped.tell()


def _by_image(annotations: list[Any]) -> Iterable[list[int]]:
    """Return the places of each picture's annotations, which lie anywhere in the file: of one picture at a time, masks take no memory."""
    found: dict[Any, list[int]] = defaultdict(list)
    for number, value in enumerate(annotations):
        owner = value.get("image_id") if isinstance(value, dict) else None
        found[owner if isinstance(owner, str | int) else None].append(number)  # None: all that will be refused
    return found.values()


def splits(path: Path) -> list[str]:
    return list(split_files(path, FILES))


def _corners(box: Any, *, where: str) -> list[list[int | float]]:
    """Return a box [left, top, width, height] as polygons."""
    if not isinstance(box, list) or len(box) != 4 or not all(type(part) in (int, float) for part in box):
        raise checks.DataError(f"{where}: it has no segmentation, and its bbox is {rle.short(box)}, not [left, top, width, height]")
    left, top, wide, high = box
    return [[left, top, left + wide, top, left + wide, top + high, left, top + high]]


def _names(categories: list[Any], file: Path) -> dict[Any, str]:
    checks.by_id(categories, "id", where=f"{file}: category")
    read = [checks.record(Category, value, where=f"{file}: category {number}") for number, value in enumerate(categories)]
    return {category.id: checks.text(category.name, where=f"{file}: category {rle.short(category.id)}") for category in read}
