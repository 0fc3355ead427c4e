"""Pascal VOC's `Annotations/<picture>.xml` -> records: the objects' masks from `SegmentationObject/`,
polygons, else boxes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ans_core.data.exports.labelled import (
    Export,
    Shape,
    each_picture,
    find,
    listed_splits,
    of_stem,
    records,
    split_of,
)
from ans_core.data.formats import checks
from ans_core.pictures import rle

CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read(place: Path, files: list[Path]) -> Export:
    """The n-th object of a file is value n of its PNG in SegmentationObject. Without PNG and polygon, a box
    is the mask of its whole area. Lists in `ImageSets/` tell the split, else folders named train, val ..."""
    listed = listed_splits(place)

    def picture(file: Path, export: Export, faults: checks.Faults) -> None:
        try:
            root = ElementTree.fromstring(file.read_bytes())
        except (ElementTree.ParseError, LookupError) as error:
            raise checks.DataError(f"{file}: no XML ({error}); export it again") from None
        base = file.parent.parent
        image = _picture(
            [base / "JPEGImages", base / "images", file.parent, base],
            file,
            root.findtext("filename") or "",
        )
        sides = (_integer(root.findtext(f"size/{side}")) for side in ("height", "width"))
        height, width = checks.image_size(image, where=str(file), stated=(next(sides), next(sides)))
        objects = root.findall("object")
        instances = _instances(base / "SegmentationObject" / f"{file.stem}.png", height, width)
        shapes = []
        for number, element in enumerate(objects):
            with faults:
                where = f"{file}: object {number}"
                segmentation: object = (
                    rle.encode(instances == number + 1)
                    if instances is not None
                    else [_polygon(element, where=where)]
                )
                if mask := export.mask(segmentation, height=height, width=width, where=where):
                    shapes.append(
                        Shape(mask=mask, label=checks.text(element.findtext("name"), where=f"{where}, name"))
                    )
        if not objects:
            export.left_out["pictures without an object"] += 1
        export.labelled += records(image, shapes, split=listed.get(file.stem) or split_of(file, place))

    return each_picture(place, files, picture)


def _picture(folders: list[Path], file: Path, name: str) -> Path:
    """Return the picture of the XML file's own name, which stays right where pictures were renamed, else the
    one it names."""
    return of_stem(folders, file.stem) or find(folders, name, where=str(file))


def _integer(text: str | None) -> int | None:
    """Some tools write a size of 0 for an unknown one."""
    return int(text) or None if text and text.isdecimal() else None


def _instances(file: Path, height: int, width: int) -> UInt8[np.ndarray, "H W"] | None:
    if not file.is_file():
        return None
    checks.image_size(file, where=str(file), stated=(height, width))
    with Image.open(file) as picture:
        if picture.mode not in ("P", "L"):
            raise checks.DataError(
                f"{file} has colours, not numbers of objects; give labelmap.txt beside SegmentationClass"
            )
        return np.asarray(picture)


def _polygon(element: ElementTree.Element, *, where: str) -> list[float]:
    """Return the object's polygon (x1, y1, x2, y2, ... as elements), or its box as one."""
    try:
        if (polygon := element.find("polygon")) is not None:
            points = {part.tag: float(part.text or "") for part in polygon}
            return [points[f"{axis}{number}"] for number in range(1, len(points) // 2 + 1) for axis in "xy"]
        left, top, right, bottom = (float(element.findtext(f"bndbox/{key}") or "") for key in CORNERS)
    except (KeyError, ValueError):
        raise checks.DataError(
            f"{where}: no polygon, and no bndbox with the numbers {', '.join(CORNERS)}"
        ) from None
    return rle.rectangle(left, top, right, bottom)
