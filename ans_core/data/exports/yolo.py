"""YOLO's label files (`labels/<picture>.txt`: a class and a polygon or box a line, in shares of the sides) ->
records."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import yaml

from ans_core.data.exports.labelled import SUFFIXES, Export, Shape, each, split_of
from ans_core.data.formats import checks
from ans_core.data.formats.media import upright_picture
from ans_core.pictures import rle

NOT_LISTED = "pictures that no list of data.yaml names"
"""A reason to leave out."""


def read(place: Path, file: Path) -> Export:
    """`file` names the classes: data.yaml, or classes.txt with one a line. A line of five numbers is a box:
    the mask of its whole area. Folders named train, valid ... tell the split, or folders and lists that
    data.yaml names; a picture that stands in none of its lists is left out."""
    root = file.parent.parent if file.parent.name == "labels" else file.parent
    names, folders, lists = _classes(file, root)
    listed = sorted(root.rglob("*"))
    pictures = [path for path in listed if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]
    labels = {label: picture for picture in pictures if (label := _label_file(picture, root))}
    texts = [
        path
        for path in listed
        if path.suffix == ".txt"
        and path != file
        and "labels" in (parts := path.relative_to(root).parts)[:-1]
        and not path.name.startswith(".")
        and "__MACOSX" not in parts
    ]
    if texts and not pictures:
        raise checks.DataError(f"{root}: {len(texts)} label files, and no picture; export the pictures, too")
    if not texts and not labels:
        raise checks.DataError(
            f"{file} names classes, and no picture has a label file (labels/<picture>.txt); masks are PNGs "
            "(not JPEGs) in masks/"
        )
    lost = [path for path in texts if path not in labels]
    if lost:
        raise checks.DataError(
            f"{lost[0]} and {len(lost) - 1} more have no picture of their name in images/; put them there, "
            "or remove these"
        )

    def read_labels(label: Path, export: Export) -> None:
        path = labels[label]
        picture = upright_picture(path, str(label))
        shapes = []
        for number, line in enumerate(checks.load_text(label).splitlines(), start=1):
            if not line.strip():
                continue
            with export.faults:
                where = f"{label}: line {number}"
                kind, polygon = _line(line, where=where)
                if kind not in names:
                    raise checks.DataError(
                        f"{where}: class {kind} is not in {file.name}, which has {sorted(names)}"
                    )
                sides = cycle((picture.width, picture.height))
                scaled = [share * side for share, side in zip(polygon, sides, strict=False)]
                if mask := export.mask([scaled], picture, where):
                    label_text = checks.text(names[kind], f"{file}: class {kind}")
                    shapes.append(Shape(mask=mask, label=label_text))
        folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
        split = lists.get(path.relative_to(root).as_posix()) or (folders[folder] if folder else None)
        if lists and not split:
            export.left_out[NOT_LISTED] += 1
            return
        export.add(path, shapes, split=split or split_of(path, place))

    export = each(root, labels, read_labels)
    if missing := len(pictures) - len(labels):
        export.left_out["pictures without a label file"] += missing
    return export


def _classes(file: Path, root: Path) -> tuple[dict[int, str], dict[Path, str], dict[str, str]]:
    """Return number -> class, and what data.yaml says of the splits of pictures below `root`: folder -> split,
    and end of a path that a list (train.txt) holds, at any slash -> split: it may be of another machine."""
    if file.suffix == ".txt":
        lines = checks.load_text(file).rstrip().splitlines()
        return dict(enumerate(line.strip() for line in lines)), {}, {}
    try:
        content = yaml.safe_load(checks.load_text(file))
    except yaml.YAMLError as error:
        raise checks.DataError(f"{file} is no YAML ({error})") from None
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names or not all(str(number).isdecimal() for number in names):
        raise checks.DataError(f"{file} has no `names`, a list of the classes, or number: class")
    if "kpt_shape" in content:
        raise checks.DataError(f"{file} is of keypoints (kpt_shape), which have no pixels; export polygons")
    folders: dict[Path, str] = {}
    listed: dict[str, str] = {}
    for split in ("train", "val", "test"):
        for path in _paths(content, split, file.parent):
            if path.is_file():
                listed |= dict.fromkeys(_ends(path), split)
            elif path.resolve() != root.resolve():
                folders[path] = split
    return {int(number): str(name) for number, name in names.items()}, folders, listed


def _ends(file: Path) -> list[str]:
    """Return `c.jpg`, `b/c.jpg` and `a/b/c.jpg` for a list's line a/b/c.jpg."""
    lines = [line.strip().replace("\\", "/") for line in checks.load_text(file).splitlines()]
    parts = [[part for part in line.split("/") if part not in ("", ".", "..")] for line in lines]
    return ["/".join(some[start:]) for some in parts for start in range(len(some))]


def _paths(content: dict[str, Any], split: str, root: Path) -> list[Path]:
    """Return the folders and lists of a split that are there. Exports write paths of other machines, and
    `../` too often. Raises DataError where none of them is there of train or val, and one is a list."""
    values = content.get(split) or []
    names = [
        str(value).replace("\\", "/").removeprefix("./")
        for value in (values if isinstance(values, list) else [values])
    ]
    tried = [root / str(content.get("path") or ".") / name for name in names] + [
        root / name.removeprefix("../") for name in names
    ]
    there = [path for path in dict.fromkeys(tried) if path.exists()]  # a list is read once
    if not there and split != "test" and any(name.endswith(".txt") for name in names):
        raise checks.DataError(
            f"{split} of data.yaml is {', '.join(names)}, which is not there; export it, too"
        )
    return there


def _label_file(picture: Path, root: Path) -> Path | None:
    """Return the picture's label file: in `labels/` for `images/`, else beside it."""
    parts = list(picture.relative_to(root).parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    tried = (root.joinpath(*parts).with_suffix(".txt"), picture.with_suffix(".txt"))
    return next((file for file in tried if file.is_file()), None)


def _line(line: str, *, where: str) -> tuple[int, list[float]]:
    """Return the class and the polygon's shares."""
    try:
        kind, *shares = map(float, line.split())
    except ValueError:
        raise checks.DataError(f"{where}: {rle.short(line)} is no class and numbers") from None
    if len(shares) == 4:
        x, y, wide, high = shares
        shares = rle.rectangle(x - wide / 2, y - high / 2, x + wide / 2, y + high / 2)
    if len(shares) < 6 or len(shares) % 2 or kind != int(kind):
        raise checks.DataError(
            f"{where}: {len(shares)} numbers after class {kind:g}; a polygon has x and y of 3 points or "
            "more, a box 4 numbers"
        )
    if not all(-rle.MARGIN <= share <= 1 + rle.MARGIN for share in shares):
        raise checks.DataError(
            f"{where}: coordinates from {min(shares):g} to {max(shares):g}; YOLO's are shares of the sides, "
            "0 to 1"
        )
    return int(kind), shares
