"""Ref-SAV (`Ref-SAV.json` with SA-V in `sam_v_full/` or beside) -> referring samples of every fourth frame of
videos, one object each.

Upstream learns from the long descriptions ("formated"); the short captions are left out, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ans_core.data.formats import checks, clip_files, sav
from ans_core.data.formats.files import find_file, split_files
from ans_core.pictures import rle
from ans_core.types import Sample

FILES = ("Ref-SAV.json",)
FOLDERS = ("sam_v_full", "")


class Video(checks.Record):
    video_path: str
    anno_path: str
    objects: Annotated[dict[str, Any], Field(min_length=1)]
    """Place of the object in the annotation -> its texts."""


class Texts(checks.Record):
    formated: str


def read(path: Path, *, split: str) -> Iterator[Sample]:
    file = split_files(path, FILES)[split]
    faults = checks.Faults(file)
    for video, where, record in faults.records(Video, checks.load_object(file), noun="video"):
        with faults:
            yield from _samples(file.parent, video, record, where, faults=faults)


def _samples(path: Path, video: str, record: Video, where: str, *, faults: checks.Faults) -> list[Sample]:
    annotation = _find(path, record.anno_path, where=where)
    media, masklets = sav.clip_of(annotation, video=_find(path, record.video_path, where=where))
    columns = list(masklets.values())
    samples = []
    for number, value in record.objects.items():
        with faults:
            here = f"{where}, object {rle.short(number)}"
            if not (
                number.isdecimal() and number.isascii() and len(number) < 9 and int(number) < len(columns)
            ):
                raise checks.DataError(
                    f"{here} is unknown: {annotation} has the objects 0 to {len(columns) - 1}"
                )
            text = checks.text(checks.record(Texts, value, here).formated, here)
            masklet = clip_files.visible(columns[int(number)], here)
            samples.append(
                media.sample(
                    sample_id=f"{video}_{number}",
                    image_id=video,
                    task="referring",
                    text=text,
                    masks=(masklet,),
                    detail=True,
                )
            )
    return samples


def _find(path: Path, name: str, *, where: str) -> Path:
    """Return a file of SA-V. The published paths repeat a folder: `sav_000/sav_train/sav_000/...` lies in
    `sav_train/sav_000/...`."""
    names = (name, name[max(name.find("sav_train/"), 0) :])
    return find_file([path / folder for folder in FOLDERS], names, where=where, noun="file")
