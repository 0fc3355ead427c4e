"""A folder with `manifest.jsonl` of annotated clips (frames, objects, `masks.json`) -> one referring sample
per object, its name as text; for evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks, clip_files
from ans_core.data.formats.files import file_of
from ans_core.pictures import rle
from ans_core.types import Sample

FILE = LAYOUT = "manifest.jsonl"


class Frame(checks.Record):
    file: str


class Object(checks.Record):
    obj_id: checks.Id
    caption: str | None = None
    name: str | None = None
    category: str | None = None


class Clip(checks.Record):
    video_id: str
    frames: checks.Filled[Frame]
    objects: checks.Filled[Object]
    masks_file: str
    width: int | None = None
    height: int | None = None


class MasksFile(checks.Record):
    masks: dict[str, list[Any]]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read the only split, "val". A null mask means that the frame is not annotated; an area of 0 means that
    the object is absent."""
    file = path / FILE
    faults = checks.Faults(file)
    for line, value in checks.load_json_lines(file):
        where = f"{file}: line {line}"
        with faults:
            clip = checks.record(Clip, value, where)
            faults.once(f"video_id {rle.short(clip.video_id)}", where=where)
            yield from _samples(path, clip, f"{where} ({clip.video_id[:60]})", faults=faults)
    faults.tell()


def splits(path: Path) -> list[str]:
    return ["val"] if (path / FILE).is_file() else []


def _samples(path: Path, clip: Clip, where: str, *, faults: checks.Faults) -> list[Sample]:
    frames = tuple(file_of(path, frame.file, where=where) for frame in clip.frames)
    if len(set(frames)) != len(frames):
        raise checks.DataError(f"{where}: a frame comes twice; a video has each of its frames once")
    media = clip_files.clip_of(frames, where, stated=(clip.height, clip.width))
    masks_file = checks.inside(path, clip.masks_file, where=where)
    masks = checks.load(MasksFile, masks_file).masks
    samples: list[Sample] = []
    checks.once((f"{where}, object {o.obj_id}", str(o.obj_id)) for o in clip.objects)
    for described in clip.objects:
        with faults:
            number = described.obj_id
            here = f"{masks_file}: object {number}"
            entries = masks.get(str(number))
            if entries is None or len(entries) != len(frames):
                held = "is missing" if entries is None else f"has {len(entries)} entries"
                raise checks.DataError(
                    f"{here} {held}; one mask (or null) is needed for each of the {len(frames)} frames of "
                    f"{where}"
                )
            masklet = tuple(None if m is None else media.some_mask(m, here, faults=faults) for m in entries)
            samples.append(
                media.sample(
                    sample_id=f"{clip.video_id}_{number}",
                    image_id=clip.video_id,
                    task="referring",
                    text=checks.text(described.caption or described.name, f"{where}, object {number}"),
                    masks=(clip_files.visible(masklet, here),),
                    meta={"category": described.category} if described.category else {},
                )
            )
    return samples
