"""Exports of annotation tools in, a folder of our own format out: `annotations.json` and the pictures beside
it.

ans_core/data/formats/layouts.py recognises a layout; here it is one reader and one line.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ans_core.data.exports import (
    cvat,
    label_studio,
    labelme,
    masks,
    panoptic,
    read_as_samples,
    supervisely,
    via,
    voc,
    yolo,
)
from ans_core.data.exports.labelled import Export, Labelled
from ans_core.data.formats import checks, layouts, plain
from ans_core.pictures import orientation, rle, transforms
from ans_core.types import RLE
from ans_core.written import atomic_folder

Reader = Callable[[Path, list[Path]], Export]


def _each(read: Callable[[Path, Path], Export]) -> Reader:
    """Read files of which each holds the labels of many pictures, as one for each split."""

    def read_all(place: Path, files: list[Path]) -> Export:
        first, *others = (read(place, file) for file in files)
        for export in others:
            first.labelled += export.labelled
            first.left_out += export.left_out
        first.file = place if others else first.file
        return first

    return read_all


EXPORTS: dict[str, Reader] = {
    "coco": _each(read_as_samples.coco_file),
    "cvat": _each(cvat.read),
    "finetune": _each(read_as_samples.finetune_file),
    "label_studio": _each(label_studio.read),
    "labelme": labelme.read,
    "masks": _each(masks.read),
    "panoptic": _each(panoptic.read),
    "supervisely": supervisely.read,
    "via": _each(via.read),
    "voc": voc.read,
    "yolo": _each(yolo.read),
}
"""Layout -> read(folder, files with labels)."""


def import_export(source: Path, out: Path, *, form: str | None = None) -> list[str]:
    """Read an export (its file, folder or zip) and write `out`, whole or not at all; return what to tell.
    Raises DataError naming the file and record of whatever is wrong, and for a folder `out` that exists."""
    if out.exists():
        raise checks.DataError(f"{out} exists; give another folder with --out, or remove it")
    if not source.exists():
        raise checks.DataError(f"{source} does not exist; give the export: a zip, a folder or a file")
    if form is not None and form not in EXPORTS:
        raise checks.DataError(f"no export format {form!r}; there are {sorted(EXPORTS)}")
    with atomic_folder(out) as partial:
        with tempfile.TemporaryDirectory() as unpacked:
            place = _unpacked(source, Path(unpacked)) if source.suffix.lower() == ".zip" else source
            try:
                layout, files = _layout(place, form)
                export = EXPORTS[layout](place if place.is_dir() else place.parent, files)
                export.check()
                export.labelled = merged(export.labelled)
            except checks.DataError as error:  # it names files of a folder that goes
                raise checks.DataError(str(error).replace(unpacked, str(source))) from None
            # a hash of the name holds some out
            if not (has_val := any(labelled.split == "val" for labelled in export.labelled)):
                export.labelled = [
                    replace(labelled, split=None if labelled.split == "train" else labelled.split)
                    for labelled in export.labelled
                ]
            doubtful = _write(export, partial)
            export.file = Path(str(export.file).replace(unpacked, str(source)))
        try:
            pictures = {  # read as training does, which finds what is left to find
                split: len({sample.image_id for sample in plain.read(partial, split=split)})
                for split in plain.splits(partial)
            }
        except checks.DataError as error:  # nothing is left at the place that it names
            raise checks.DataError(
                f"{source}, imported: {str(error).replace(str(partial), str(out))}"
            ) from None
    counts = ", ".join(f"{split} {count:,}" for split, count in pictures.items())
    how = (
        "as the export has them"
        if has_val
        else 'the export has no "val": one picture in five by a hash of its name'
    )
    return [
        *_summary(export),
        *doubtful,
        f"pictures by split: {counts} ({how})",
        f"wrote {out / 'annotations.json'}",
    ]


def _unpacked(archive: Path, into: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as opened:
            for member in opened.infolist():
                member.filename = member.filename.replace("\\", "/")  # some tools on Windows write folders so
                opened.extract(member, into)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise checks.DataError(f"{archive}: {error}; download the export again") from None
    except RuntimeError as error:  # a password, or a compression that Python does not know
        raise checks.DataError(f"{archive}: {error}; unpack it and give the folder") from None
    return into


def _layout(place: Path, form: str | None) -> tuple[str, list[Path]]:
    """Return the layout, `form` if it is given, and its files with labels. Raises DataError for none that is
    known, and for several."""
    recognised = layouts.recognise(place)
    if form is not None:
        files = [place] if place.is_file() else recognised.get(form, [])
        if not files:
            raise checks.DataError(
                f"{place} holds no labels of the layout {form}, but {_names(place, recognised)}"
            )
        return form, files
    importable = {layout: files for layout, files in recognised.items() if layout in EXPORTS}
    if len(importable) == 1:
        return next(iter(importable.items()))
    if "annotations" in recognised and not importable:
        raise checks.DataError(
            f"{place} is in our own format already: `ans data check {place}` and `ans finetune {place}` "
            "read it as it is"
        )
    if "sam" in recognised and not importable:
        raise checks.DataError(layouts.WORDLESS.format(file=recognised["sam"][0]))
    if importable:
        raise checks.DataError(
            f"{place} holds labels of {len(importable)} layouts: {_names(place, importable)}; name one with "
            "--format, or give the path of one file"
        )
    raise checks.DataError(f"{place} holds no labels of {', '.join(sorted(EXPORTS))}. {layouts.HOW}")


def _names(place: Path, recognised: dict[str, list[Path]]) -> str:
    return (
        ", ".join(f"{layout} ({files[0].relative_to(place)})" for layout, files in recognised.items())
        or "none that is known"
    )


def merged(labelled: Iterable[Labelled]) -> list[Labelled]:
    """Return the records with one of each picture and text: the same picture may stand in an export twice (in
    two tasks, under two ids). Referring means the objects of all; of captions with the same masks one is
    left. Raises DataError if they are in two splits."""
    by_key: dict[tuple[Any, ...], Labelled] = {}
    for one in labelled:
        counts = [mask["counts"] for mask in one.masks]
        key = (one.picture, one.task, checks.text_key(one.text), *(() if one.task == "referring" else counts))
        if (before := by_key.setdefault(key, one)) is one:
            continue
        if before.split != one.split:
            raise checks.DataError(
                f"{one.picture} with {one.text!r} is in the splits {before.split} and {one.split}; leave it "
                "in one"
            )
        there = {mask["counts"] for mask in before.masks}
        by_key[key] = replace(
            before, masks=[*before.masks, *(mask for mask in one.masks if mask["counts"] not in there)]
        )
    return list(by_key.values())


def _write(export: Export, out: Path) -> list[str]:
    """Copy the pictures to `images/` and write the records. Pictures of one name from several folders get
    numbers. Return what is doubtful."""
    (out / "images").mkdir()
    names: dict[Path, str] = {}
    taken: set[str] = set()
    records: list[dict[str, Any]] = []
    for labelled in export.labelled:
        if labelled.picture not in names:
            stem, suffix = labelled.picture.stem, labelled.picture.suffix
            number, name = 2, labelled.picture.name
            while name in taken:
                name, number = f"{stem}-{number}{suffix}", number + 1
            names[labelled.picture] = name
            taken.add(name)
            shutil.copyfile(labelled.picture, out / "images" / name)
        masks = [
            _of_stored(mask, labelled.picture) if export.masks_upright else mask for mask in labelled.masks
        ]
        record = {"image": f"images/{names[labelled.picture]}", "text": labelled.text, "masks": masks}
        more = {"task": labelled.task} if labelled.task != "referring" else {}
        records.append(record | more | ({"split": labelled.split} if labelled.split else {}))
    (out / "annotations.json").write_text(
        json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )
    return _doubtful(names) if export.masks_upright else []


def _of_stored(mask: RLE, picture: Path) -> RLE:
    """Return a mask that was drawn in a labelling tool on the stored pixels, which annotations.json's masks
    are of. Tools show pictures upright; the mask's size tells of one that does not, if the picture is turned
    by a quarter."""
    (width, height), turn = transforms.stored(picture)
    of_stored = orientation.swaps_sides(turn) and height != width and mask["size"] == [height, width]
    return mask if of_stored else rle.stored(mask, turn)


def _doubtful(pictures: Iterable[Path]) -> list[str]:
    """Return a line about the pictures that an EXIF tag turns or mirrors without a change of size."""
    names = []
    for picture in pictures:
        (width, height), turn = transforms.stored(picture)
        if turn != orientation.UPRIGHT and (width == height or not orientation.swaps_sides(turn)):
            names.append(picture.name)
    if not names:
        return []
    return [
        f"warning: {len(names):,} pictures are turned or mirrored by an EXIF tag that leaves their size, as "
        f"{names[0]}. Their masks are taken as drawn on the turned picture, which tools show: look at them "
        "(`ans data show`); if they lie wrong, turn the pixels, drop the tag and label these again"
    ]


def _summary(export: Export) -> list[str]:
    tasks = Counter(labelled.task for labelled in export.labelled)
    pictures = len({labelled.picture for labelled in export.labelled})
    objects = sum(rle.area(mask) > 0 for labelled in export.labelled for mask in labelled.masks)
    left = [f"left out: {count:,} {reason}" for reason, count in export.left_out.most_common()]
    counts = ", ".join(f"{count:,} {task}" for task, count in tasks.items())
    return [f"{export.file}: {pictures:,} pictures, {counts} records, {objects:,} masks", *left]
