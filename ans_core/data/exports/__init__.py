"""Exports of annotation tools in, a folder of our own format out: `annotations.json` and the pictures beside it."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ans_core import orientation, rle, transforms
from ans_core.data.exports import cvat, label_studio, read_as_samples
from ans_core.data.exports.labelled import Export, Labelled
from ans_core.data.formats import checks, plain
from ans_core.types import RLE
from ans_core.written import written_whole

EXPORTS: dict[str, Callable[[Path], Export]] = {
    "coco": read_as_samples.coco_file,
    "cvat": cvat.read,
    "label_studio": label_studio.read,
    "finetune": read_as_samples.finetune_file,
}
"""Format -> read(file)."""


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
                file = _file(place, form)
                export = EXPORTS[form or _format(file)](file)
                export.labelled = merged(export.labelled)
            except checks.DataError as error:  # it names files of a folder that goes
                raise checks.DataError(str(error).replace(unpacked, str(source))) from None
            doubtful = _write(export, partial)
            export.file = Path(str(export.file).replace(unpacked, str(source)))
        try:
            for split in plain.splits(partial):  # the reader that training uses finds what is left to find
                for _ in plain.read(partial, name=out.name, split=split):
                    pass
        except checks.DataError as error:  # nothing is left at the place that it names
            raise checks.DataError(f"{source}, imported: {str(error).replace(str(partial), str(out))}") from None
    return _told(export, out, doubtful)


def _unpacked(archive: Path, into: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(into)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise checks.DataError(f"{archive}: {error}; download the export again") from None
    except RuntimeError as error:  # a password, or a compression that Python does not know
        raise checks.DataError(f"{archive}: {error}; unpack it and give the folder") from None
    return into


def _file(place: Path, form: str | None) -> Path:
    """Return the one file with annotations in a folder."""
    if place.is_file():
        return place
    listed = sorted(file for file in place.rglob("*") if file.suffix.lower() in {".xml", ".json"} and "__MACOSX" not in file.parts)
    fitting = [file for file in listed if (found := _format(file, or_none=True)) and form in (None, found)]
    if len(fitting) != 1:
        names = [str(file.relative_to(place)) for file in fitting or listed]
        what = f"{len(fitting)} files with annotations ({', '.join(names[:5])})" if fitting else f"no annotations, only {names[:5]}"
        raise checks.DataError(f"{place} holds {what}; give the path of one file of {sorted(EXPORTS)} (of a zip: unpack it first)")
    return fitting[0]


def _format(file: Path, *, or_none: bool = False) -> str:
    """Return the format that the file's content tells."""
    found = "cvat" if file.suffix.lower() == ".xml" else _json_format(checks.load_json(file))
    if not found and not or_none:
        raise checks.DataError(f"{file} is no export that is known; name its format with --format, one of {sorted(EXPORTS)}")
    return found


def _json_format(content: Any) -> str:
    if isinstance(content, dict):
        return "coco" if {"images", "annotations", "categories"} <= content.keys() else ""
    first = content[0] if isinstance(content, list) and content else {}
    if not isinstance(first, dict):
        return ""
    if "data" in first and ("annotations" in first or "completions" in first):
        return "label_studio"
    return "finetune" if {"image", "mask", "text"} <= first.keys() else ""


def merged(labelled: Iterable[Labelled]) -> list[Labelled]:
    """Return the records with one of each picture and text: the same picture may stand in an export twice (in two tasks, under two ids).
    Referring means the objects of all; of captions with the same masks one is left. Raises DataError if they are in two splits."""
    found: dict[tuple[Any, ...], Labelled] = {}
    for one in labelled:
        counts = [mask["counts"] for mask in one.masks]
        key = (one.picture, one.task, checks.text_key(one.text), *(() if one.task == "referring" else counts))
        if (before := found.setdefault(key, one)) is one:
            continue
        if before.split != one.split:
            raise checks.DataError(f"{one.picture} with {one.text!r} is in the splits {before.split} and {one.split}; leave it in one")
        there = {mask["counts"] for mask in before.masks}
        found[key] = replace(before, masks=[*before.masks, *(mask for mask in one.masks if mask["counts"] not in there)])
    return list(found.values())


def _write(export: Export, out: Path) -> list[str]:
    """Copy the pictures to `images/` and write the records. Pictures of one name from several folders get numbers. Return what is
    doubtful."""
    (out / "images").mkdir()
    names: dict[Path, str] = {}
    records: list[dict[str, Any]] = []
    for labelled in export.labelled:
        if labelled.picture not in names:
            stem, suffix = labelled.picture.stem, labelled.picture.suffix
            taken, number, name = set(names.values()), 2, labelled.picture.name
            while name in taken:
                name, number = f"{stem}-{number}{suffix}", number + 1
            names[labelled.picture] = name
            shutil.copyfile(labelled.picture, out / "images" / name)
        masks = [_of_stored(mask, labelled.picture) if export.drawn_upright else mask for mask in labelled.masks]
        record = {"image": f"images/{names[labelled.picture]}", "text": labelled.text, "masks": masks}
        more = {"task": labelled.task} if labelled.task != "referring" else {}
        records.append(record | more | ({"split": labelled.split} if labelled.split else {}))
    (out / "annotations.json").write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return _doubtful(names) if export.drawn_upright else []


def _of_stored(mask: RLE, picture: Path) -> RLE:
    """Return a mask that was drawn in a labelling tool on the stored pixels, which annotations.json's masks are of. Tools show pictures
    upright; the mask's size tells of one that does not, if the picture is turned by a quarter."""
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
        f"warning: {len(names):,} pictures are turned or mirrored by an EXIF tag that leaves their size, as {names[0]}. Their masks are "
        "taken as drawn on the turned picture, which tools show: look at them (`ans data show`); if they lie wrong, turn the pixels, drop "
        "the tag and label these again"
    ]


def _told(export: Export, out: Path, doubtful: Sequence[str]) -> list[str]:
    tasks = Counter(labelled.task for labelled in export.labelled)
    pictures = len({labelled.picture for labelled in export.labelled})
    objects = sum(rle.area(mask) > 0 for labelled in export.labelled for mask in labelled.masks)
    left = [f"left out: {count:,} {reason}" for reason, count in export.left_out.most_common()]
    counts = ", ".join(f"{count:,} {task}" for task, count in tasks.items())
    head = f"{export.file}: {pictures:,} pictures, {counts} records, {objects:,} masks"
    return [head, *left, *doubtful, f"wrote {out / 'annotations.json'}"]
