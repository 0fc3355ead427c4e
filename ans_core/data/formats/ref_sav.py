"""Ref-SAV (`Ref-SAV.json` with SA-V in `sam_v_full/` or beside) -> referring samples of every fourth frame of
videos, one object each.

Upstream learns from the long descriptions ("formated"); the short captions are left out, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ans_core import nearest_file
from ans_core.data.formats import checks, clip_files, sav
from ans_core.pictures import rle
from ans_core.types import Sample

FILE = "Ref-SAV.json"
FOLDERS = ("sam_v_full", "")


class Video(checks.Record):
    video_path: str
    anno_path: str
    objects: Annotated[dict[str, Any], Field(min_length=1)]
    """Place of the object in the annotation -> its texts."""


class Texts(checks.Record):
    formated: str


def read(path: Path, *, split: str) -> Iterator[Sample]:
    file = path / FILE
    videos = checks.load_json(file)
    if not isinstance(videos, dict) or not videos:
        raise checks.DataError(f"{file}: expected an object of videos, found {rle.short(videos)}")
    faults = checks.Faults(file)
    for video, value in videos.items():
        with faults:
            where = f"{file}: video {rle.short(video)}"
            yield from _samples(
                path, video, checks.record(Video, value, where=where), where=where, faults=faults
            )
    faults.tell()


def splits(path: Path) -> list[str]:
    if not (path / FILE).is_file():
        raise checks.DataError(f"{path} holds no {FILE}")
    return ["train"]


def _samples(path: Path, video: str, record: Video, *, where: str, faults: checks.Faults) -> list[Sample]:
    annotation = _find(path, record.anno_path, where=where)
    frames, (height, width), masklets = sav.clip_of(
        annotation, video=_find(path, record.video_path, where=where)
    )
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
            text = checks.text(checks.record(Texts, value, where=here).formated, where=here)
            masklet = clip_files.visible(columns[int(number)], where=here)
            samples.append(
                Sample(
                    sample_id=f"{video}_{number}", image_id=video, frames=frames, height=height,
                    width=width, task="referring", text=text, masks=(masklet,), detail=True,
                )
            )  # fmt: skip
    return samples


def _find(path: Path, name: str, *, where: str) -> Path:
    """Return a file of SA-V. The published paths repeat a folder: `sav_000/sav_train/sav_000/...` lies in
    `sav_train/sav_000/...`."""
    names = dict.fromkeys((name, name[max(name.find("sav_train/"), 0) :]))
    tried = [checks.inside(path / folder, n, where=where) for folder in FOLDERS for n in names]
    if existing := next((file for file in tried if file.is_file()), None):
        return existing
    raise checks.DataError(
        f"{where}: the file {rle.short(name)} is at none of {', '.join(map(str, tried))}; put (or link) "
        "SA-V there" + nearest_file.hint(*tried)
    )
