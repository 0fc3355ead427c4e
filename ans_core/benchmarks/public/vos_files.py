"""Truth and predictions of video object segmentation, from files -> one clip of object numbers at a time.

Truth: folders of PNGs, `<video>/<frame>.png` of object numbers (DAVIS, MOSE) or
`<video>/<object>/<frame>.png` (SA-V, whose objects may overlap), or a data set's own folder with
`Annotations`. Predictions: the same, or predictions.jsonl of a run: {"video", "objects", "overlap", "frames",
"size", "masks": [[RLE or null per frame] per object]}. Predictions alone may be JSON files that hold their
truth: {"sequence", "height", "width", "objects": [{"id", "truth", "prediction"}]}.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Inputs
from ans_core.pictures import rle
from ans_core.pictures.object_numbers import VOID, fault, is_binary, with_inside

IndexMask = UInt8[np.ndarray, "H W"]
INNER = ("Annotations", "Annotations_6fps", "480p")
"""Folders inside a data set's own that lead to its masks."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    name: str
    truth: list[IndexMask]
    predictions: list[IndexMask]


def clips(inputs: Inputs) -> Iterator[Clip]:
    """Yield one clip at a time; without --data the predictions hold the truth."""
    if inputs.data is None:
        yield from _recorded(inputs.predictions)
        return
    true_root = masks_folder(split_folder(inputs.data, inputs.split))
    predictions = _read_predictions(inputs.predictions, true_root)
    true_videos = videos_of(inputs.data, inputs.split) or folders(true_root)
    if not true_videos:
        raise ValueError(f"{true_root}: no folder of a video in it")
    if unknown := [video for video in predictions.videos if video not in true_videos]:
        raise ValueError(
            f"{true_root}: {len(unknown)} videos are not there: {files.shown(unknown)}; they are predicted: "
            "of another split?"
        )
    missing = [video for video in true_videos if video not in predictions.videos]
    if missing and not inputs.predicted_only:
        raise ValueError(
            f"{inputs.predictions}: {len(missing)} videos are not there: {files.shown(missing)};"
            " predict them, name their --split, or score the others alone (--predicted-only)"
        )
    for video in true_videos:
        if video not in missing:
            objects: list[str | None] = [*folders(true_root / video)] or [None]
            yield from (_clip(video, one, true_root, predictions) for one in objects)


def split_folder(root: Path, split: str) -> Path:
    """Return the folder of a split where a data set has one (MOSE: train, valid; SA-V: sav_val), else
    `root`."""
    names = [split, f"sav_{split}", *(["valid"] if split == "val" else [])] if split else []
    return next((root / name for name in names if (root / name).is_dir()), root)


def videos_of(root: Path, split: str) -> list[str]:
    """Return the videos that a data set's list of a split names; [] without a list."""
    inner = split_folder(root, split)
    for path in (
        root / f"ImageSets/2017/{split}.txt",
        root / f"ImageSets/{split}.txt",
        inner / f"{inner.name}.txt",
        root / f"{split}.txt",
    ):
        if split and path.is_file():
            return sorted(path.read_text(encoding="utf-8-sig").split())
    return []


def masks_folder(root: Path) -> Path:
    """Return the folder of the videos' masks; a data set's own folder may be given whole."""
    for name in INNER:
        if (root / name).is_dir():
            root = root / name
    return root


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@runtime_checkable
class _Predictions(Protocol):
    videos: list[str]

    def masks(self, video: str, one: str | None, frames: Sequence[str]) -> list[IndexMask]:
        """Return the masks of these frames (names without suffix), of one object or of all."""


def _read_predictions(predictions: Path, true_root: Path) -> _Predictions:
    if predictions.is_dir():
        root = masks_folder(predictions)
        files.refuse_same(root, true_root)
        return _Pictures(root)
    if ".jsonl" not in predictions.suffixes:
        raise ValueError(
            f"{predictions} is a file, which holds its truth itself; leave --data out, or give the folder "
            "of predicted PNGs"
        )
    return _Records(predictions)


class _Pictures:
    def __init__(self, root: Path) -> None:
        self.root, self.videos = root, folders(root)

    def masks(self, video: str, one: str | None, frames: Sequence[str]) -> list[IndexMask]:
        folder = self.root / video / (one or "")
        if absent := [f"{frame}.png" for frame in frames if not (folder / f"{frame}.png").is_file()]:
            raise ValueError(
                f"{folder}: {len(absent)} of {len(frames)} frames are not there: {files.shown(absent)}"
            )
        return [files.index_mask(folder / f"{frame}.png") for frame in frames]


class _Records:
    """The lines of a run, read as they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = files.Lines(path, lambda line: files.text(line, "video", where="record"))
        self.videos = list(self.lines)

    def masks(self, video: str, one: str | None, frames: Sequence[str]) -> list[IndexMask]:
        where = f"{self.path}, {video}"
        record = self.lines[video]
        names, masklets = (
            files.listed(record, "objects", where=where, of=str),
            files.listed(record, "masks", where=where, of=list),
        )
        place = {name: t for t, name in enumerate(files.listed(record, "frames", where=where, of=str))}
        if len(names) != len(masklets) or any(len(masklet) != len(place) for masklet in masklets):
            raise ValueError(
                f"{where}: {len(names)} objects in {len(place)} frames, but masks of "
                f"{[len(m) for m in masklets]} frames"
            )
        if absent := [frame for frame in frames if frame not in place]:
            raise ValueError(
                f"{where}: {len(absent)} of {len(frames)} frames are not there: {files.shown(absent)}"
            )
        if one is None and record.get("overlap"):
            raise ValueError(
                f"{where}: its objects overlap, the truth's don't (a folder an object); predict on this "
                "data set"
            )
        if one is None and not all(name.isdigit() and 0 < int(name) < VOID for name in names):
            raise ValueError(
                f"{where}: objects {files.shown(names)} are no numbers of a PNG (1 to {VOID - 1})"
            )
        if one is not None and one not in names:
            raise ValueError(f"{where}: no object {one}; there are {files.shown(names)}")
        height, width = files.mask_size({"size": record.get("size")}, where=where)
        labels = [np.zeros((height, width), np.uint8) for _ in frames]
        for name, masklet in zip(names, masklets, strict=True):
            for t, frame in enumerate(frames):
                coded = files.mask(
                    masklet[place[frame]],
                    height=height,
                    width=width,
                    where=f"{where}, object {name}, frame {frame}",
                )
                if one in (None, name):
                    labels[t][rle.decode(coded)] = 1 if one else int(name)
        return labels


def _clip(video: str, one: str | None, true_root: Path, predictions: _Predictions) -> Clip:
    folder = true_root / video / (one or "")
    frames = annotated_frames(folder)
    if len(frames) < 3:
        raise ValueError(
            f"{folder}: {len(frames)} PNGs; the first and last don't count, so at least 3 are needed"
        )
    real = [files.index_mask(folder / f"{frame}.png") for frame in frames]
    predicted = predictions.masks(video, one, frames)
    numbers = {number for frame in real for number in np.unique(frame).tolist()}
    if not one and (reason := fault(numbers, set().union(*map(with_inside, real)))):
        raise ValueError(f"{folder}: {reason}")
    single = one or is_binary(numbers)
    for frame, true, other in zip(frames, real, predicted, strict=True):
        where = f"{video}/{one}" if one else video
        if true.shape != other.shape or true.shape != real[0].shape:
            raise ValueError(
                f"{where}, {frame}.png: [height, width] {other.shape}, the truth's is {true.shape}, its "
                f"first frame's {real[0].shape}"
            )
        if single and max(len(np.unique(true)), len(np.unique(other))) > 2:
            raise ValueError(f"{where}, {frame}.png: more than one object, where the truth has one alone")
    if single:
        real, predicted = ([(frame > 0).astype(np.uint8) for frame in listed] for listed in (real, predicted))
    return Clip(name=f"{video}/{one}" if one else video, truth=real, predictions=predicted)


def annotated_frames(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.png"))


def _recorded(path: Path) -> Iterator[Clip]:
    sources = (
        [path] if path.is_file() else sorted(itertools.chain(path.glob("*.json"), path.glob("*.json.gz")))
    )
    any_clip = False
    for source in sources:
        record = files.load(source)
        if isinstance(record, dict) and {"sequence", "height", "width", "objects"} <= set(record):
            any_clip = True
            yield Clip(
                name=record["sequence"],
                truth=_filled(record, "truth", source),
                predictions=_filled(record, "prediction", source),
            )
    if not any_clip:
        raise ValueError(
            f"{path}: no file with sequence, height, width and objects; for folders of PNGs give the truth "
            "with --data"
        )


def _filled(record: dict[str, Any], key: str, source: Path) -> list[IndexMask]:
    height, width = record["height"], record["width"]
    lengths = {
        len(files.value(one, which, where=str(source)))
        for one in record["objects"]
        for which in ("truth", "prediction")
    }
    if len(lengths) != 1:
        raise ValueError(
            f"{source}: masks of {sorted(lengths)} frames; every object needs one, or null, in every frame"
        )
    frames = [np.zeros((height, width), np.uint8) for _ in range(lengths.pop())]
    for one in record["objects"]:
        if one.get("id") not in range(1, VOID):
            raise ValueError(
                f"{source}: object id {rle.short(one.get('id'))} is no number of a PNG (1 to {VOID - 1})"
            )
        for t, coded in enumerate(one[key]):
            where = f"{source}, object {one['id']}, frame {t}"
            pixels = rle.decode(files.mask(coded, height=height, width=width, where=where))
            if frames[t][pixels].any():
                raise ValueError(
                    f"{where}: the {key} overlaps another object's; a PNG of object numbers could not hold it"
                )
            frames[t][pixels] = one["id"]
    return frames
