"""Truth and predictions of video object segmentation, from files -> one clip of object numbers at a time.

Truth: folders of PNGs, `<video>/<frame>.png` of object numbers (DAVIS, MOSE) or
`<video>/<object>/<frame>.png` (SA-V, whose objects may overlap), or a data set's own folder with
`Annotations`. Predictions: the same, or predictions.jsonl of a run: {"video", "objects", "overlap", "frames",
"size", "masks": [[RLE or null per frame] per object]}. Predictions alone may be JSON files that hold their
truth: {"sequence", "height", "width", "objects": [{"id", "truth", "prediction"}]}.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Inputs
from ans_core.pictures import rle
from ans_core.pictures.object_numbers import VOID, fault, is_binary, with_inside

IndexMask = UInt8[np.ndarray, "H W"]
ReadMasks = Callable[[str, str | None, Sequence[str]], list[IndexMask]]
"""(video, one of its objects or None for all, names of frames without suffix) -> the masks of the frames."""
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
    predicted, read_masks = _read_predictions(inputs.predictions, true_root)
    true_videos = videos_of(inputs.data, inputs.split) or folders(true_root)
    if not true_videos:
        raise ValueError(f"{true_root}: no folder of a video in it")
    if unknown := [video for video in predicted if video not in true_videos]:
        raise ValueError(
            f"{true_root}: {len(unknown)} videos are not there: {files.shown(unknown)}; they are predicted: "
            "of another split?"
        )
    missing = [video for video in true_videos if video not in predicted]
    if missing and not inputs.predicted_only:
        raise ValueError(
            f"{inputs.predictions}: {len(missing)} videos are not there: {files.shown(missing)};"
            " predict them, name their --split, or score the others alone (--predicted-only)"
        )
    for video in true_videos:
        if video not in missing:
            objects: list[str | None] = [*folders(true_root / video)] or [None]
            yield from (_clip(video, one, true_root, read_masks) for one in objects)


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


def _read_predictions(predictions: Path, true_root: Path) -> tuple[list[str], ReadMasks]:
    """Return the videos that are predicted, and what reads their masks."""
    if predictions.is_dir():
        root = masks_folder(predictions)
        files.refuse_same(root, true_root)
        return folders(root), lambda video, one, frames: files.index_masks(root / video / (one or ""), frames)
    if ".jsonl" not in predictions.suffixes:
        raise ValueError(
            f"{predictions} is a file, which holds its truth itself; leave --data out, or give the folder "
            "of predicted PNGs"
        )
    lines = files.Lines(predictions, lambda line: line.text("video"))
    return list(lines), lambda video, one, frames: masks_of_record(lines[video], one, frames)


def masks_of_record(record: files.Record, one: str | None, frames: Sequence[str]) -> list[IndexMask]:
    """Return the masks of these frames that a line of a run holds: numbers of objects, or 1 where one object
    (`one`) is."""
    names, masklets, described = (
        record.listed("objects", str), record.listed("masks", list), record.listed("frames", str)
    )  # fmt: skip
    place = {name: t for t, name in enumerate(described)}
    where = record.where
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
            f"{where}: its objects overlap, the truth's don't (a folder an object); predict on this data set"
        )
    if one is None and not all(name.isdigit() and 0 < int(name) < VOID for name in names):
        raise ValueError(f"{where}: objects {files.shown(names)} are no numbers of a PNG (1 to {VOID - 1})")
    if one is not None and one not in names:
        raise ValueError(f"{where}: no object {one}; there are {files.shown(names)}")
    size = record.size()
    labels = [np.zeros(size, np.uint8) for _ in frames]
    for name, masklet in zip(names, masklets, strict=True):
        for t, frame in enumerate(frames):
            here = f"{where}, object {name}, frame {frame}"
            coded = files.mask(masklet[place[frame]], size, where=here)
            if one in (None, name):
                labels[t][rle.decode(coded)] = 1 if one else int(name)
    return labels


def _clip(video: str, one: str | None, true_root: Path, read_masks: ReadMasks) -> Clip:
    folder = true_root / video / (one or "")
    frames = check_frames(folder)
    real, predicted = files.index_masks(folder, frames), read_masks(video, one, frames)
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


def check_frames(folder: Path) -> list[str]:
    """Return the annotated frames. Raises ValueError where they are too few to be scored."""
    frames = annotated_frames(folder)
    if len(frames) < 3:
        raise ValueError(
            f"{folder}: {len(frames)} PNGs; the first and last don't count, so at least 3 are needed"
        )
    return frames


def annotated_frames(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.png"))


def _recorded(path: Path) -> Iterator[Clip]:
    sources = (
        [path] if path.is_file() else sorted(itertools.chain(path.glob("*.json"), path.glob("*.json.gz")))
    )
    any_clip = False
    for source in sources:
        loaded = files.load(source)
        if isinstance(loaded, dict) and {"sequence", "height", "width", "objects"} <= set(loaded):
            any_clip = True
            record = files.Record(loaded, str(source))
            truth, predictions = (_filled(record, key) for key in ("truth", "prediction"))
            yield Clip(name=record["sequence"], truth=truth, predictions=predictions)
    if not any_clip:
        raise ValueError(
            f"{path}: no file with sequence, height, width and objects; for folders of PNGs give the truth "
            "with --data"
        )


def _filled(record: files.Record, key: str) -> list[IndexMask]:
    size, objects = (record["height"], record["width"]), record.records("objects")
    lengths = {len(one.listed(which)) for one in objects for which in ("truth", "prediction")}
    if len(lengths) != 1:
        raise ValueError(
            f"{record.where}: masks of {sorted(lengths)} frames; every object needs one, or null, in every frame"
        )
    frames = [np.zeros(size, np.uint8) for _ in range(lengths.pop())]
    for one in objects:
        number = one.get("id")
        if number not in range(1, VOID):
            raise ValueError(
                f"{record.where}: object id {rle.short(number)} is no number of a PNG (1 to {VOID - 1})"
            )
        for t, coded in enumerate(one[key]):
            where = f"{record.where}, object {number}, frame {t}"
            pixels = rle.decode(files.mask(coded, size, where=where))
            if frames[t][pixels].any():
                raise ValueError(
                    f"{where}: the {key} overlaps another object's; a PNG of object numbers could not hold it"
                )
            frames[t][pixels] = number
    return frames
