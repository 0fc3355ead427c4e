"""COCO's instances (`instances_<split>2017.json`: images, annotations, categories) -> one referring sample
per picture and category.

The category's name is the expression, and means all its objects. A crowd (`iscrowd`: many objects in one
mask) counts as one more object, as it is of the category too; `meta["joined"]` names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks
from ans_core.data.formats.files import ImageFolders, split_files
from ans_core.data.formats.media import Media
from ans_core.pictures import rle
from ans_core.types import RLE, Frames, Sample

FILES = (
    "instances*.json",
    "annotations/instances*.json",
    "_annotations.coco.json",
    "*/_annotations.coco.json",
)
"""As published, and as Roboflow exports it: a folder a split."""
YEAR = slice(len("instances_"), None)
"""Part of a file's name that names its folder of pictures: instances_train2017.json belongs to train2017."""


class Picture(checks.Record):
    id: checks.Id
    file_name: str
    height: checks.Integer | None = None
    width: checks.Integer | None = None


class Annotation(checks.Record):
    image_id: checks.Id
    category_id: checks.Id
    segmentation: Any = None
    bbox: Any = None
    iscrowd: checks.Integer = 0


class Category(checks.Record):
    id: checks.Id
    name: str


@dataclass(frozen=True, kw_only=True)
class AnnotatedPicture:
    id: Any
    """Of several of one file the first."""
    media: Media
    annotations: list[int]
    """Their places in the file."""


class Content(checks.Record):
    images: checks.Filled[Any]
    annotations: checks.Filled[Any]
    categories: checks.Filled[Any]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split. `path` is the folder or the file. Left out and counted: objects without a pixel, and
    pictures without an object."""
    file = split_files(path, FILES)[split]
    split_name = file.stem[YEAR]
    folders = [
        f"{up}/{part}"
        for up in (".", "..")
        for part in (split_name, f"images/{split_name}", "images", split_name.rstrip("0123456789"))
    ]
    return instances(file, ImageFolders(file.parent, [*folders, "."]))


def instances(
    file: Path,
    images: ImageFolders,
    *,
    text: Callable[[str], str] = str,
    located: Callable[[str], str] = str,
    faults: checks.Faults | None = None,
) -> Iterator[Sample]:
    """Read a file in COCO's form. `text`: a category's name -> the expression. `located`: `file_name` ->
    where the picture lies. `faults` counts what is left out, for the caller.

    Categories of one expression are one, and so are images of one file: all their objects are in one sample.
    """
    content = checks.load(Content, file)
    faults = faults or checks.Faults(file)
    names = category_names(content.categories, file)
    first_of = first_of_name({number: text(category) for number, category in names.items()}, faults)
    pictures = _pictures(content, images, located, file=file, faults=faults)
    faults.usable = 0  # of the annotations
    for picture in pictures.values():
        objects: dict[Any, list[tuple[RLE, bool]]] = {}
        for number in picture.annotations:
            with faults:
                where = f"{file}: annotation {number}"
                annotation = checks.record(Annotation, content.annotations[number], where)
                if "segmentation" not in content.annotations[number] and annotation.bbox is None:
                    raise checks.DataError(f"{where}: it has neither segmentation nor bbox")
                if annotation.category_id not in names:
                    raise checks.DataError(
                        f"{where}: category_id {rle.short(annotation.category_id)} is in no list of the file"
                    )
                outline = outline_or_box(annotation.segmentation, annotation.bbox, where, faults=faults)
                mask = picture.media.usable_mask(outline, where, faults=faults)
                shapes = objects.setdefault(first_of[annotation.category_id], [])
                if (shape := (mask, bool(annotation.iscrowd))) in shapes:
                    faults.notes["objects are there twice and are one"] += 1
                else:
                    shapes.append(shape)
        for category_id, shapes in objects.items():
            crowds = [place for place, (_, crowd) in enumerate(shapes) if crowd]
            yield picture.media.sample(
                sample_id=f"{picture.id}_{category_id}",
                image_id=str(picture.id),
                task="referring",
                text=text(names[category_id]),
                masks=tuple((mask,) for mask, _ in shapes),
                meta={"category": names[category_id], "kind": "crowd" if crowds else "instances"}
                | ({"joined": crowds} if crowds else {}),
            )
    faults.tell()


def _pictures(
    content: Content,
    images: ImageFolders,
    located: Callable[[str], str],
    *,
    file: Path,
    faults: checks.Faults,
) -> dict[Frames, AnnotatedPicture]:
    """Return the pictures by their files. Their annotations lie anywhere in the file; of one picture at a
    time, masks take no memory."""
    images_by_id = checks.by_id(content.images, f"{file}: image")
    places: dict[Any, list[int]] = defaultdict(list)
    for number, value in enumerate(content.annotations):
        try:
            places[checks.as_id(value["image_id"])].append(number)
        except (TypeError, LookupError, ValueError):
            places[None].append(number)  # all that will be refused
    pictures: dict[Frames, AnnotatedPicture] = {}
    for image_id, numbers in places.items():
        if image_id not in images_by_id:
            for number in numbers:
                with faults:
                    where = f"{file}: annotation {number}"
                    annotation = checks.record(Annotation, content.annotations[number], where)
                    raise checks.DataError(
                        f"{where}: image_id {rle.short(annotation.image_id)} is in no list of the file"
                    )
            continue
        with faults:
            where = f"{file}: image {rle.short(image_id)}"
            picture = checks.record(Picture, images_by_id[image_id], where)
            media = images.find(
                located(picture.file_name), where=where, stated=(picture.height, picture.width)
            )
            if media.frames in pictures:
                faults.notes["images have the file of another and are one with it"] += 1
            record = AnnotatedPicture(id=image_id, media=media, annotations=[])
            pictures.setdefault(media.frames, record).annotations.extend(numbers)
    return pictures


def outline_or_box(segmentation: Any, box: Any, where: str, *, faults: checks.Faults) -> Any:
    """Return the segmentation; where it is empty, null or missing, as tools write it that drew a rectangle,
    the box [left, top, width, height] as polygons."""
    if segmentation not in (None, [], [[]]) or box is None:
        return segmentation
    if not isinstance(box, list) or len(box) != 4 or not all(type(part) in (int, float) for part in box):
        raise checks.DataError(
            f"{where}: it has no segmentation, and its bbox is {rle.short(box)}, not [left, top, width, "
            "height]"
        )
    faults.notes["objects have a box and no outline: the box is their mask"] += 1
    left, top, wide, high = box
    return [rle.rectangle(left, top, left + wide, top + high)]


def first_of_name(texts: Mapping[Any, str], faults: checks.Faults) -> dict[Any, Any]:
    """Return the first category of the same text for each category: files that were joined name one thing
    twice."""
    first: dict[str, Any] = {}
    firsts = {number: first.setdefault(checks.text_key(text), number) for number, text in texts.items()}
    if same := len(firsts) - len(first):
        faults.notes["categories have the name of another and are one with it"] += same
    return firsts


def category_names(values: list[Any], file: Path, *, spelt: Callable[[str], str] = str) -> dict[Any, str]:
    """Return the names of categories by id, each with single blanks, after `spelt`."""
    names = {}
    for number, value in checks.by_id(values, f"{file}: category").items():
        where = f"{file}: category {rle.short(number)}"
        name = spelt(checks.record(Category, value, where).name)
        names[number] = " ".join(checks.text(name, where).split())
    return names
