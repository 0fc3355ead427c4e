"""Pictures with masks (PNG, GIF, TIFF or BMP, whose values or colours are classes) and a list of the classes
-> records: a class means all its pixels."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64
from PIL import Image

from ans_core.data.exports.labelled import (
    Export,
    Shape,
    colour_codes,
    each,
    listed_splits,
    of_stem,
    split_of,
)
from ans_core.data.formats import checks
from ans_core.data.formats.layouts import MASK_FOLDERS, mask_files
from ans_core.data.formats.media import picture_of
from ans_core.pictures import rle
from ans_core.pictures.object_numbers import VOID, smoothed, with_inside

PICTURE_FOLDERS = ("images", "image", "imgs", "img", "JPEGImages")
NOTHING = {"background", "_background_", "bg", "unlabeled", "unlabelled", "void", "ignore", "_ignore_"}
"""Names of classes that are no objects."""
VOID_COLOUR = 224 + 256 * 224 + 65536 * 192
"""Pascal VOC's void: as VOID in masks of values no class, unless the list names it."""
HOW = (
    "write classes.txt beside the folder of masks, one class a line: the first line is value 0 "
    "(background), the second value 1, and so on; of masks of 0 and 255 the second line is 255"
)


@dataclass(frozen=True, kw_only=True)
class Classes:
    names: dict[int, str]
    """Value, or R + 256 G + 65,536 B, -> class."""
    coloured: bool


def read(place: Path, file: Path) -> Export:
    """`file` names the classes: Roboflow's _classes.csv, CVAT's labelmap.txt, or classes.txt. Where CVAT's
    `SegmentationObject/` is there, its colours part a class into objects. Folders named train, valid ... or
    lists in `ImageSets/` tell the split."""
    if file.is_dir():
        raise checks.DataError(f"{file}: the values of its masks have no names; {HOW}")
    classes, root = _classes(file), file.parent
    listed = listed_splits(root)
    masks = _mask_files(root)
    pairs = {mask: shown for mask in masks if (shown := _picture_of(mask, root))}
    if not pairs:
        raise checks.DataError(
            f"{root}: no mask in {', '.join(MASK_FOLDERS)} has a picture of its name in "
            f"{', '.join(PICTURE_FOLDERS)}"
        )
    if lonely := [mask for mask in masks if mask not in pairs]:
        raise checks.DataError(
            f"{lonely[0]} and {len(lonely) - 1} more masks have no picture of their name in "
            f"{', '.join(PICTURE_FOLDERS)}; put them there, or remove these"
        )
    two = not classes.coloured and max(classes.names) == 1
    is_binary = two and all(set(np.unique(_values(mask, coloured=False))) <= {0, VOID} for mask in pairs)

    rims: list[str] = []
    """Why masks look smoothed. A mask of a few thin things may; most masks of a set don't."""

    def read_mask(mask: Path, export: Export) -> None:
        picture_of(pairs[mask], str(mask), stated=picture_of(mask, str(mask)).size)
        values = _values(mask, coloured=classes.coloured)
        if is_binary:
            values //= VOID
        numbers = np.unique(values).tolist()
        if numbers[-1] <= VOID and (why := smoothed(numbers, with_inside(values.astype(np.uint8)))):
            rims.append(f"{mask} holds {why}")
        names = {value: classes.names.get(value) for value in numbers}
        unknown = [value for value, name in names.items() if not name and value not in (VOID, VOID_COLOUR)]
        if unknown:
            raise checks.DataError(
                f"{mask}: values {unknown[:5]} are no class of {file.name}, which has "
                f"{rle.short(classes.names)}"
            )
        shapes = []
        for value, name in names.items():
            if name and name.lower() not in NOTHING:
                shapes += [
                    Shape(mask=rle.encode(part), label=checks.text(name, str(file)))
                    for part in _parts(values == value, mask)
                ]
        if not shapes:
            export.left_out["pictures without an object"] += 1
        export.add(pairs[mask], shapes, split=listed.get(mask.stem) or split_of(mask, place))

    export = each(root, pairs, read_mask)
    if len(rims) > len(pairs) / 2:
        raise checks.DataError(f"{rims[0]} (so in {len(rims)} of {len(pairs)} masks)")
    return export


def _classes(file: Path) -> Classes:
    text = checks.load_text(file).rstrip().splitlines()
    lines = [line.strip() for line in text if line.strip() and not line.startswith("#")]
    try:
        if file.name == "labelmap.txt":  # name:r,g,b:parts:actions
            rows = [line.split(":")[:2] for line in lines]
            return Classes(names={_code(colour): name for name, colour in rows}, coloured=True)
        if file.suffix == ".csv":  # a heading, then value, class
            rows = list(csv.reader(lines))[1:]
            return Classes(names={int(value): name.strip() for value, name in rows}, coloured=False)
    except ValueError as error:
        raise checks.DataError(f"{file}: {error}; export it again") from None
    if not lines:
        raise checks.DataError(f"{file} is empty; {HOW}")
    numbered = [line.strip() for line in text]  # an empty line is a value without a class
    return Classes(
        names=dict(enumerate(numbered)) if len(numbered) > 1 else {0: "background", 1: lines[0]},
        coloured=False,
    )


def _code(colour: str) -> int:
    red, green, blue = map(int, colour.split(","))
    return red + 256 * green + 65536 * blue


def _mask_files(root: Path) -> list[Path]:
    files = sorted(mask_files(root))
    in_folders = [f for f in files if not {*f.relative_to(root).parts[:-1]}.isdisjoint(MASK_FOLDERS)]
    return in_folders or [file for file in files if file.stem.endswith("_mask")]


def _picture_of(mask: Path, root: Path) -> Path | None:
    """Return the picture of a mask: of the same name, but for `_mask`, in the folder of pictures for the
    folder of masks, or beside it."""
    parts = mask.relative_to(root).parts[:-1]
    place = next((place for place, part in enumerate(parts) if part in MASK_FOLDERS), None)
    folders = (
        [mask.parent]
        if place is None
        else [root.joinpath(*parts[:place], name, *parts[place + 1 :]) for name in PICTURE_FOLDERS]
    )
    return of_stem(folders, mask.stem.removesuffix("_mask"))


def _values(file: Path, *, coloured: bool) -> Int64[np.ndarray, "H W"]:
    with Image.open(file) as picture:
        if coloured:
            return colour_codes(picture)
        pixels = np.asarray(picture)
        if pixels.ndim == 3 and (pixels[..., :3] == pixels[..., :1]).all():  # grey, saved as colour
            pixels = pixels[..., 0]
        if pixels.ndim == 3:
            raise checks.DataError(
                f"{file} has colours; name them in labelmap.txt beside its folder, a line each: "
                "name:red,green,blue::"
            )
        return pixels.astype(np.int64)


def _parts(full: Bool[np.ndarray, "H W"], mask: Path) -> list[Bool[np.ndarray, "H W"]]:
    """Return a class's objects, by the colours of the PNG in SegmentationObject; without it, one."""
    file = mask.parent.parent / "SegmentationObject" / mask.name
    if mask.parent.name != "SegmentationClass" or not file.is_file():
        return [full]
    objects = _values(file, coloured=True)
    if objects.shape != full.shape:
        raise checks.DataError(
            f"{file} has [height, width] = {list(objects.shape)}, {mask} {list(full.shape)}"
        )
    return [full & (objects == value) for value in np.unique(objects[full])]
