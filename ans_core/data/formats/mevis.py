"""A MeViS-type folder (`<split>/meta_expressions.json`, `mask_dict.json`, `JPEGImages/<video>/<frame>`) -> referring samples of
videos.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ans_core import rle
from ans_core.data.formats import checks
from ans_core.types import Masklet, Sample

SUFFIXES = (".jpg", ".png")


class Expression(checks.Record):
    exp: str
    anno_id: list[checks.Id]
    kind: str | None = None


class Video(checks.Record):
    frames: Annotated[list[str], Field(min_length=1)]
    expressions: dict[str, Any]


class Videos(checks.Record):
    videos: Annotated[dict[str, Any], Field(min_length=1)]


class MaskDict:
    """The masks of mask_dict.json; null means that the object is not visible in that frame: area 0, as the benchmark counts it."""

    def __init__(self, file: Path) -> None:
        self.file, self.entries = file, checks.load_json(file)
        if not isinstance(self.entries, dict):
            raise checks.DataError(f"{file}: expected an object of masks by annotation, found {rle.short(self.entries)}")
        self.masklet = lru_cache(maxsize=64)(self._masklet)  # a video's expressions share their objects

    def _masklet(self, anno: str, frames: int, height: int, width: int) -> Masklet:
        where = f"{self.file}: {anno}"
        if anno not in self.entries:
            raise checks.DataError(f"{where} is missing; meta_expressions.json and mask_dict.json must be of one release")
        masks = self.entries[anno]
        if not isinstance(masks, list) or len(masks) != frames:
            raise checks.DataError(
                f"{where} is {rle.short(masks)}, not a list with one mask (or null) for each of the video's {frames} frames"
            )
        absent = rle.empty(height, width)
        masklet = tuple(absent if m is None else checks.some_mask(m, height=height, width=width, where=where) for m in masks)
        if not any(rle.area(m) for m in masklet):
            raise checks.DataError(f"{where}: no pixel in any frame; leave the object out")
        return masklet


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    checks.known_split(split, splits(path), path=path)
    file = path / split / "meta_expressions.json"
    masks = MaskDict(path / split / "mask_dict.json")
    faults = checks.Faults(path / split)
    samples: list[Sample] = []
    for video, value in checks.record(Videos, checks.load_json(file), where=str(file)).videos.items():
        where = f"{file}: video {rle.short(video)}"
        with faults:
            record = checks.record(Video, value, where=where)
            frames = _frames(checks.inside(path / split / "JPEGImages", video, where=where), record.frames, where=where)
            height, width = _size(frames, where=where)
            for number, expression in record.expressions.items():
                with faults:
                    here = f"{where}, expression {rle.short(number)}"
                    asked = checks.record(Expression, expression, where=here)
                    samples.append(
                        Sample(
                            sample_id=f"{video}_{number}",
                            dataset=name,
                            image_id=video,
                            frames=frames,
                            height=height,
                            width=width,
                            task="referring",
                            text=checks.text(asked.exp, where=here),
                            masks=tuple(masks.masklet(str(anno), len(frames), height, width) for anno in asked.anno_id),
                            meta={"kind": asked.kind} if asked.kind is not None else {},
                        )
                    )
    faults.tell()
    return samples


def splits(path: Path) -> list[str]:
    found = sorted(p.parent.name for p in path.glob("*/meta_expressions.json"))
    if not found:
        raise checks.DataError(f"{path}: no <split>/meta_expressions.json")
    return found


def _frames(folder: Path, names: list[str], *, where: str) -> tuple[Path, ...]:
    if len(set(names)) != len(names):
        raise checks.DataError(f"{where}: a frame comes twice in the list of frames")
    suffix = next((s for s in SUFFIXES if checks.inside(folder, f"{names[0]}{s}", where=where).is_file()), SUFFIXES[0])
    return tuple(checks.inside(folder, f"{frame}{suffix}", where=where) for frame in names)


def _size(frames: tuple[Path, ...], *, where: str) -> tuple[int, int]:
    first = checks.image_size(frames[0], where=where)
    for frame in frames[1:]:
        if (size := checks.image_size(frame, where=where)) != first:
            raise checks.DataError(
                f"{where}: {frame.name} is {size}, the first frame {first} (height, width); the frames of a video are of one size"
            )
    return first
