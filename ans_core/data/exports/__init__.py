"""Exports of annotation tools in, a folder of our own format out: `annotations.json` and the pictures beside it.

ans_core/data/formats/layouts.py recognises a layout; here it is one reader and one line.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ans_core import rle
from ans_core.data.exports import cvat, label_studio, labelme, masks, panoptic, read_as_samples, supervisely, via, voc, yolo
from ans_core.data.exports.labelled import Export
from ans_core.data.formats import checks, layouts, plain
from ans_core.written import written_whole

Reader = Callable[[Path, list[Path]], Export]


def _each(read: Callable[[Path, Path], Export]) -> Reader:
    """Read files of which each holds the labels of many pictures, as one for each split. A picture in two of them is a fault."""

    def read_all(place: Path, files: list[Path]) -> Export:
        first, *others = (read(place, file) for file in files)
        owners = dict.fromkeys((labelled.picture for labelled in first.labelled), first.file)
        for export in others:
            first.add(export, owners)
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
    """Read an export (its file, folder or zip) and write `out`, whole or not at all; return what to tell. Raises DataError naming the file
    and record of whatever is wrong, and for a folder `out` that exists."""
    if out.exists():
        raise checks.DataError(f"{out} exists; give another folder with --out, or remove it")
    if not source.exists():
        raise checks.DataError(f"{source} does not exist; give the export: a zip, a folder or a file")
    if form is not None and form not in EXPORTS:
        raise checks.DataError(f"no export format {form!r}; there are {sorted(EXPORTS)}")
    with written_whole(out) as partial:
        with tempfile.TemporaryDirectory() as unpacked:
            place = _unpacked(source, Path(unpacked)) if source.suffix.lower() == ".zip" else source
            try:
                layout, files = _layout(place, form)
                export = EXPORTS[layout](place if place.is_dir() else place.parent, files)
                export.check()
            except checks.DataError as error:  # it names files of a folder that goes
                raise checks.DataError(str(error).replace(unpacked, str(source))) from None
            if not (has_val := any(labelled.split == "val" for labelled in export.labelled)):  # a hash of the name holds some out
                export.labelled = [
                    replace(labelled, split=None if labelled.split == "train" else labelled.split) for labelled in export.labelled
                ]
            _write(export, partial)
            export.file = Path(str(export.file).replace(unpacked, str(source)))
        pictures = {  # read as training does, which finds what is left to find
            split: len({sample.image_id for sample in plain.read(partial, name=out.name, split=split)}) for split in plain.splits(partial)
        }
    counts = ", ".join(f"{split} {count:,}" for split, count in pictures.items())
    how = "as the export has them" if has_val else 'the export has no "val": one picture in five by a hash of its name'
    return [*_told(export), f"pictures by split: {counts} ({how})", f"wrote {out / 'annotations.json'}"]


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
    """Return the layout, `form` if it is given, and its files with labels. Raises DataError for none that is known, and for several."""
    found = layouts.recognise(place)
    if form is not None:
        files = [place] if place.is_file() else found.get(form, [])
        if not files:
            raise checks.DataError(f"{place} holds no labels of the layout {form}, but {_names(place, found)}")
        return form, files
    known = {layout: files for layout, files in found.items() if layout in EXPORTS}
    if len(known) == 1:
        return next(iter(known.items()))
    if "annotations" in found and not known:
        raise checks.DataError(
            f"{place} is in our own format already: `ans data check {place}` and `ans finetune {place}` read it as it is"
        )
    if "sam" in found and not known:
        raise checks.DataError(layouts.WORDLESS.format(file=found["sam"][0]))
    if known:
        raise checks.DataError(
            f"{place} holds labels of {len(known)} layouts: {_names(place, known)}; name one with --format, or give the path of one file"
        )
    raise checks.DataError(f"{place} holds no labels of {sorted(EXPORTS)}. {layouts.HOW}")


def _names(place: Path, found: dict[str, list[Path]]) -> str:
    return ", ".join(f"{layout} ({files[0].relative_to(place)})" for layout, files in found.items()) or "none that is known"


def _write(export: Export, out: Path) -> None:
    """Copy the pictures to `images/` and write the records. Pictures of one name from several folders get numbers."""
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
        record = {"image": f"images/{names[labelled.picture]}", "text": labelled.text, "masks": list(labelled.masks)}
        more = {"task": labelled.task} if labelled.task != "referring" else {}
        records.append(record | more | ({"split": labelled.split} if labelled.split else {}))
    (out / "annotations.json").write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _told(export: Export) -> list[str]:
    tasks = Counter(labelled.task for labelled in export.labelled)
    pictures = len({labelled.picture for labelled in export.labelled})
    objects = sum(rle.area(mask) > 0 for labelled in export.labelled for mask in labelled.masks)
    left = [f"left out: {count:,} {reason}" for reason, count in export.left_out.most_common()]
    counts = ", ".join(f"{count:,} {task}" for task, count in tasks.items())
    return [f"{export.file}: {pictures:,} pictures, {counts} records, {objects:,} masks", *left]
