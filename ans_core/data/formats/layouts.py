"""A folder or file of labelled pictures -> the tool or convention that wrote it, and the files that hold the
labels."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks

MASK_FOLDERS = ("masks", "mask", "SegmentationClass", "labels", "annotations", "Annotations")
"""Names of folders of pictures whose values are classes."""
MASK_SUFFIXES = {".png", ".gif", ".tif", ".tiff", ".bmp"}
"""Of pictures that keep values as they were written."""
XML_ROOTS = {b"annotations": "cvat", b"annotation": "voc"}
CLASS_LISTS = {"_classes.csv", "labelmap.txt", "classes.txt"}
"""Names of files that name the classes of masks; the last, of YOLO's labels as well."""
SUFFIXES = {".json", ".xml", ".yaml", ".yml", ".csv"}
KEYS = (
    ("reasonseg", {"text", "is_sentence", "shapes"}),
    ("labelme", {"shapes", "imagePath"}),
    ("supervisely", {"size", "objects"}),
    ("coco", {"images", "annotations", "categories"}),
    ("via", {"_via_img_metadata"}),
    ("sam", {"image", "annotations"}),
)
"""Layout -> keys of its JSON objects, the first that fits."""
HOW = (
    "Layouts that are read: docs/your-data.md#importing-labels. Of any other, let the annotation tool "
    "export COCO, or write annotations.json (docs/your-data.md#step-by-step)"
)
"""What to do with labels that are in no known layout."""
WORDLESS = (
    "{file} has masks without classes or texts, as SA-1B's files; export COCO segmentation instead. (Of "
    "SA-1B itself, SAM2's memory can be trained: the format sa1b)"
)
"""What to do with files of the layout `sam`, as Roboflow exports for SAM 2."""
ENCODING = "cp1252"
"""Of some of ReasonSeg's files."""


def recognise(place: Path, *, limit: int | None = None) -> dict[str, list[Path]]:
    """Return layout -> files with labels of a folder, or of one file. `limit`: look at the first so many
    files that may hold labels."""
    files = _label_files(place) if place.is_dir() else iter([place])
    layouts: dict[str, list[Path]] = {}
    broken: list[checks.DataError] = []
    for file in islice(files, limit):
        try:
            if layout := layout_of(file):
                layouts.setdefault(layout, []).append(file)
        except checks.DataError as error:  # a file of notes, maybe
            broken.append(error)
    if broken and not layouts:
        raise broken[0]
    for fault in broken:
        logging.warning("not read: %s", fault)
    if yamls := [file for file in layouts.get("yolo", []) if file.name != "classes.txt"]:
        layouts["yolo"] = yamls  # they name the classes, too
    if "masks" in layouts:
        layouts.pop("voc", None)  # its boxes; the masks say more
    if not layouts and place.is_dir() and (folders := _mask_folders(place)):
        return {"masks": folders}
    return layouts


def layout_of(file: Path) -> str:
    """Return the layout that a file's name and content tell, "" for none."""
    if file.name in CLASS_LISTS:
        is_of_masks = (
            file.name == "_classes.csv"
            or _mask_folders(file.parent)
            or any(mask.stem.endswith("_mask") for mask in mask_files(file.parent))
        )
        return "masks" if is_of_masks else "yolo" if file.name == "classes.txt" else ""
    suffix = file.suffix.lower()
    if suffix == ".xml":
        with file.open("rb") as opened:
            root = re.search(rb"<(\w+)", opened.read(2000))  # neither <?xml nor <!--
        return XML_ROOTS.get(root[1], "") if root else ""
    if suffix in (".yaml", ".yml"):
        return "yolo" if re.search(rb"(?m)^names\s*:", file.read_bytes()) else ""
    if suffix == ".csv":
        with file.open("rb") as opened:
            return "via" if b"region_shape_attributes" in opened.readline(2000) else ""
    return _json_layout(checks.load_json(file, encoding=ENCODING)) if suffix == ".json" else ""


def _json_layout(content: Any) -> str:
    if isinstance(content, dict):
        if "segments_info" in _first(content.get("annotations")):
            return "panoptic"
        if content.get("categories") == []:  # COCO's captions
            return ""
        layout = next((name for name, keys in KEYS if keys <= content.keys()), "")
        return layout or ("via" if {"filename", "regions"} <= _first(list(content.values())).keys() else "")
    first = _first(content)
    if "data" in first and ("annotations" in first or "completions" in first):
        return "label_studio"
    if "image" in first and ("masks" in first or "question" in first):
        return "annotations"
    return "finetune" if {"image", "mask", "text"} <= first.keys() else ""


def _first(values: Any) -> dict[str, Any]:
    return values[0] if isinstance(values, list) and values and isinstance(values[0], dict) else {}


def _label_files(place: Path) -> Iterator[Path]:
    for file in sorted(place.rglob("*")):
        hidden = any(part.startswith(".") or part == "__MACOSX" for part in file.relative_to(place).parts)
        if not hidden and (file.suffix.lower() in SUFFIXES or file.name in CLASS_LISTS):
            yield file


def mask_files(place: Path) -> Iterator[Path]:
    """Yield the files of a folder that may be masks by their names."""
    files = (file for file in place.rglob("*") if not file.name.startswith("."))
    return (file for file in files if file.suffix.lower() in MASK_SUFFIXES)


def _mask_folders(place: Path) -> list[Path]:
    """Return the folders of masks (`masks/`, `annotations/` ...) that hold some."""
    return [
        folder
        for name in MASK_FOLDERS
        for folder in sorted(place.rglob(name))
        if next(mask_files(folder), None)
    ]
