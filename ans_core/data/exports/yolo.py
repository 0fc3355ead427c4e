"""YOLO's label files (`labels/<picture>.txt`: a class and a polygon or box a line, in shares of the sides) ->
records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ans_core.data.exports.labelled import SUFFIXES, Export, Shape, each_picture, records, split_of
from ans_core.data.formats import checks
from ans_core.pictures import rle


def read(place: Path, file: Path) -> Export:
    """`file` names the classes: data.yaml, or classes.txt with one a line. A line of five numbers is a box:
    the mask of its whole area. Folders named train, valid ... tell the split, or those that data.yaml
    names."""
    names, folders = _classes(file)
    root = file.parent.parent if file.parent.name == "labels" else file.parent
    listed = sorted(root.rglob("*"))
    pictures = [path for path in listed if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]
    labels = {label: picture for picture in pictures if (label := _label_file(picture, root))}
    texts = [
        path
        for path in listed
        if path.suffix == ".txt" and path != file and "labels" in path.relative_to(root).parts[:-1]
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

    def picture(label: Path, export: Export, faults: checks.Faults) -> None:
        image = labels[label]
        height, width = checks.shown_size(image, where=str(label))
        shapes = []
        for number, line in enumerate(checks.load_text(label).splitlines(), start=1):
            if not line.strip():
                continue
            with faults:
                where = f"{label}: line {number}"
                kind, polygon = _line(line, where=where)
                if kind not in names:
                    raise checks.DataError(
                        f"{where}: class {kind} is not in {file.name}, which has {sorted(names)}"
                    )
                scaled = [share * (width, height)[place % 2] for place, share in enumerate(polygon)]
                if mask := export.mask([scaled], height=height, width=width, where=where):
                    shapes.append(
                        Shape(mask=mask, label=checks.text(names[kind], where=f"{file}: class {kind}"))
                    )
        split = next((split for folder, split in folders.items() if image.is_relative_to(folder)), None)
        export.labelled += records(image, shapes, split=split or split_of(image, place))

    export = each_picture(root, labels, picture)
    if missing := len(pictures) - len(labels):
        export.left_out["pictures without a label file"] += missing
    return export


def _classes(file: Path) -> tuple[dict[int, str], dict[Path, str]]:
    """Return number -> class, and folder -> split."""
    if file.suffix == ".txt":
        return dict(enumerate(line.strip() for line in checks.load_text(file).rstrip().splitlines())), {}
    try:
        content = yaml.safe_load(checks.load_text(file))
    except yaml.YAMLError as error:
        raise checks.DataError(f"{file} is no YAML ({error})") from None
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names:
        raise checks.DataError(f"{file} has no `names`, a list of the classes")
    if "kpt_shape" in content:
        raise checks.DataError(f"{file} is of keypoints (kpt_shape), which have no pixels; export polygons")
    folders = {
        folder: split
        for split in ("train", "val", "test")
        for folder in _folders(content, split, file.parent)
    }
    return {int(number): str(name) for number, name in names.items()}, folders


def _folders(content: dict[str, Any], split: str, root: Path) -> list[Path]:
    """Return the folders of a split that are there. Exports write paths of other machines, and `../` too
    often."""
    values = content.get(split) or []
    names = [
        str(value).replace("\\", "/").removeprefix("./")
        for value in (values if isinstance(values, list) else [values])
    ]
    tried = [root / str(content.get("path") or ".") / name for name in names] + [
        root / name.removeprefix("../") for name in names
    ]
    return [folder for folder in tried if folder.is_dir() and folder.resolve() != root.resolve()]


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
