"""Clips of DAVIS 2017, MOSE and SA-V whose objects a SAM2 follows: each from the first frame that shows it,
by its true mask.

DAVIS: JPEGImages/480p/<video>, Annotations/480p/<video>, ImageSets/2017/<split>.txt
MOSE: <split>/JPEGImages/<video>, <split>/Annotations/<video>
SA-V: sav_<split>/JPEGImages_24fps/<video>, sav_<split>/Annotations_6fps/<video>/<object>,
sav_<split>/sav_<split>.txt
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Objects, Runner, UnscoredError
from ans_core.benchmarks.public.vos_files import (
    annotated_frames,
    check_frames,
    folders,
    masks_folder,
    split_folder,
    videos_of,
)
from ans_core.data.formats import clip_files
from ans_core.data.formats.media import Media
from ans_core.metrics.mask import counts
from ans_core.pictures import rle, transforms
from ans_core.pictures.media import place_in_time
from ans_core.types import RLE, Masklet, Prediction, Request

SPLITS = ("val", "valid", "train", "test")
PICTURES = ("JPEGImages/480p", "JPEGImages", "JPEGImages_24fps")


def items(root: Path, split: str) -> Iterator[Item]:
    """Yield a clip at a time; its masks are read when its turn comes."""
    inner = split_folder(root, split)
    listed = videos_of(root, split)
    if not listed and split not in (inner.name, inner.name.removeprefix("sav_")) and inner == root:
        raise ValueError(
            f"{root} has no list and no folder of split {split!r}; give the folder of the split, or one of "
            "a data set"
        )
    pictures, masks = files.pictures(inner, *PICTURES), masks_folder(inner)
    for video in listed or folders(masks):
        for folder in (pictures / video, masks / video):
            if not folder.is_dir():
                raise ValueError(f"{folder} is not there, a video of split {split}")
        paths = (path for path in (pictures / video).iterdir() if path.suffix.lower() in files.PICTURES)
        frames = sorted(paths, key=lambda path: place_in_time(path.stem))
        if not frames:
            raise ValueError(f"{pictures / video}: no pictures ({', '.join(files.PICTURES)})")
        (width, height), _ = transforms.stored(frames[0])
        clip = Media(frames=tuple(frames), height=height, width=width)
        yield Item(
            name=video,
            request=Request(frames=clip.frames, text="", clip=True),
            facts={"video": video, "frames": [frame.stem for frame in frames], "size": list(clip.size)},
            objects=cache(partial(_objects, masks / video, [frame.stem for frame in frames], clip)),
        )


def _objects(folder: Path, frames: Sequence[str], clip: Media) -> Objects:
    """Read the PNGs of a video. Raises ValueError for one that is of no frame or of another size, and without
    any object."""
    names = folders(folder)
    masklets: dict[str, Masklet] = {}
    for one in names or [""]:
        numbered = clip_files.palette_masklets(folder / one, frames, clip, str(folder))
        if not one:
            masklets = {str(number): masklet for number, masklet in numbered.items()}
        elif numbered:  # a folder is an object, whatever numbers its PNGs have
            masklets[one] = tuple(map(_united, zip(*numbered.values(), strict=True)))
    if not masklets:
        raise ValueError(f"{folder}: no object in its PNGs")
    ordered = sorted(masklets, key=lambda name: (len(name), name))  # numbers in their order
    return Objects(
        names=tuple(ordered), masklets=tuple(masklets[name] for name in ordered), overlap=bool(names)
    )


def _united(masks: Sequence[RLE | None]) -> RLE | None:
    there = [mask for mask in masks if mask is not None]
    return rle.union(there) if there else None


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    assert item.objects is not None
    objects = item.objects()
    return {
        **item.facts,
        "objects": list(objects.names),
        "overlap": objects.overlap,
        "masks": prediction.masks,
    }


def mean_j(item: Item, prediction: Prediction) -> float:
    """J of all objects in all annotated frames: for the progress bar."""
    assert item.objects is not None
    pairs = [
        (predicted, real)
        for masklet, truth in zip(prediction.masks, item.objects().masklets, strict=True)
        for predicted, real in zip(masklet, truth, strict=True)
        if real is not None
    ]
    return float(
        np.mean([counts(predicted or rle.empty(*item.facts["size"]), real).iou for predicted, real in pairs])
    )


def split_of(root: Path) -> str:
    """Return the first split that the folder has, else its own name: then it is the split."""
    return next((s for s in SPLITS if videos_of(root, s) or split_folder(root, s) != root), root.name)


def truth(root: Path, split: str) -> Path:
    masks = masks_folder(split_folder(root, split))
    video = next(iter(videos_of(root, split) or folders(masks)))
    one = next(iter(folders(masks / video)), "")
    if len(annotated_frames(masks / video / one)) < 3:
        raise UnscoredError(
            f"{masks / video / one} has the first frame's mask alone (the others are on the server): `ans "
            "eval submit vos` writes the file"
        )
    return root


def check_truth(root: Path, split: str) -> None:
    """Raise ValueError for a clip with too few masks to be scored."""
    masks = masks_folder(split_folder(root, split))
    for video in videos_of(root, split) or folders(masks):
        for one in folders(masks / video) or [""]:
            check_frames(masks / video / one)


RUNNER = Runner(
    items=items,
    record=record,
    splits=SPLITS,
    truth=truth,
    running=("J", mean_j),
    notes=("objects are given by their true mask in the first frame that shows them",),
    follows=True,
    split_of=split_of,
    needs=check_truth,
)
