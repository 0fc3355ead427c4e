"""Pascal VOC's `Annotations/<picture>.xml` -> records: the objects' masks from `SegmentationObject/`,
polygons, else boxes."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ans_core.data.exports.labelled import (
    Export,
    Shape,
    each,
    find,
    listed_splits,
    of_stem,
    split_of,
    xml_root,
)
from ans_core.data.formats import checks
from ans_core.data.formats.media import Media, picture_of
from ans_core.pictures import rle

CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read(place: Path, files: list[Path]) -> Export:
    """The n-th object of a file is value n of its PNG in SegmentationObject. Without PNG and polygon, a box
    is the mask of its whole area. Lists in `ImageSets/` tell the split, else folders named train, val ..."""
    listed = listed_splits(place)

    def read_file(file: Path, export: Export) -> None:
        root, base = xml_root(file), file.parent.parent
        folders = [base / "JPEGImages", base / "images", file.parent, base]
        # the XML file's own name stays right where pictures were renamed
        path = of_stem(folders, file.stem) or find(folders, root.findtext("filename") or "", where=str(file))
        stated = (_integer(root.findtext("size/height")), _integer(root.findtext("size/width")))
        picture = picture_of(path, str(file), stated=stated)
        objects = root.findall("object")
        instances = _instances(base / "SegmentationObject" / f"{file.stem}.png", picture)
        shapes = []
        for number, element in enumerate(objects):
            with export.faults:
                where = f"{file}: object {number}"
                segmentation: object = (
                    rle.encode(instances == number + 1)
                    if instances is not None
                    else [_polygon(element, where)]
                )
                if mask := export.mask(segmentation, picture, where):
                    label = checks.text(element.findtext("name"), f"{where}, name")
                    shapes.append(Shape(mask=mask, label=label))
        if not objects:
            export.left_out["pictures without an object"] += 1
        export.add(path, shapes, split=listed.get(file.stem) or split_of(file, place))

    return each(place, files, read_file)


def _integer(text: str | None) -> int | None:
    """Some tools write a size of 0 for an unknown one."""
    return int(text) or None if text and text.isdecimal() else None


def _instances(file: Path, picture: Media) -> UInt8[np.ndarray, "H W"] | None:
    if not file.is_file():
        return None
    picture_of(file, str(file), stated=picture.size)
    with Image.open(file) as opened:
        if opened.mode not in ("P", "L"):
            raise checks.DataError(
                f"{file} has colours, not numbers of objects; give labelmap.txt beside SegmentationClass"
            )
        return np.asarray(opened)


def _polygon(element: Element, where: str) -> list[float]:
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
    return rle.rectangle(max(left - 1, 0.0), max(top - 1, 0.0), right, bottom)  # from 1, last pixel included
