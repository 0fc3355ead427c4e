"""What readers of clips share: the frames of a clip on disk, palette PNGs -> masklets, object masklets ->
samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ans_core.data.formats import checks
from ans_core.data.formats.files import find_file, url_of
from ans_core.data.formats.media import UNSTATED, Media, Stated, picture_of
from ans_core.pictures import object_numbers, rle, transforms, video_file
from ans_core.pictures.media import place_in_time
from ans_core.types import RLE, FilePart, Frames, Masklet, Sample, VideoFrames

SUFFIXES = (".jpg", ".png", ".jpeg")
VIDEO = ".mp4"


def listed(folder: Path, where: str) -> list[str]:
    """Return the names of a folder's pictures without their suffix, in order of time."""
    stems = (p.stem for p in folder.iterdir() if p.suffix.lower() in SUFFIXES) if folder.is_dir() else ()
    names = sorted(stems, key=place_in_time)
    if not names:
        raise checks.DataError(f"{where}: {folder} holds no frames ({', '.join(SUFFIXES)})")
    if len(set(names)) != len(names):
        raise checks.DataError(f"{where}: {folder} holds a frame twice, with two suffixes; keep one")
    return names


def frames_of(folder: Path, names: Sequence[str], *, where: str) -> Frames:
    """Return the frames of these names in a folder. Without the folder: those of the video <folder>.mp4 that
    the names number."""
    if len(set(names)) != len(names):
        raise checks.DataError(f"{where}: a frame comes twice in the list of frames")
    video = folder.parent / f"{folder.name}{VIDEO}"
    if not folder.is_dir() and video.is_file():
        return _numbered(video, names, where=where)
    if base := url_of(folder.parent, f"{folder.name}/"):
        return tuple(FilePart(file=f"{base}{name}{SUFFIXES[0]}") for name in names)
    endings = [*SUFFIXES, *(suffix.upper() for suffix in SUFFIXES)]
    # most end as the first does
    endings.sort(key=lambda ending: not checks.inside(folder, f"{names[0]}{ending}", where=where).is_file())

    def file(frame: str) -> Path:
        tried = (checks.inside(folder, f"{frame}{ending}", where=where) for ending in endings)
        return next(
            (path for path in tried if path.is_file()),
            checks.inside(folder, f"{frame}{endings[0]}", where=where),
        )

    return tuple(map(file, names))


def video_frames(video: Path, where: str) -> VideoFrames:
    try:
        return video_file.frames_of(video)
    except ValueError as error:
        raise checks.DataError(f"{where}: {error}") from None


def find_video(folders: Sequence[Path], names: Sequence[str], *, where: str) -> Media:
    """Return all frames of the first video of these names in these folders."""
    return clip_of(video_frames(find_file(folders, names, where=where, noun="video"), where), where)


def _numbered(video: Path, names: Sequence[str], *, where: str) -> Frames:
    every = video_frames(video, where)
    if not all(
        name.isdecimal() and name.isascii() and int(name[:9]) < len(every) and len(name) < 10
        for name in names
    ):
        raise checks.DataError(
            f"{where}: the frames {rle.short(list(names))} don't number those of {video}, which has "
            f"{len(every)}"
        )
    numbers = [int(name) for name in names]
    steps = {b - a for a, b in pairwise(numbers)} or {1}
    if len(steps) == 1 and min(steps) > 0:
        step = steps.pop()
        return VideoFrames(video, range(numbers[0], numbers[-1] + 1, step))
    return tuple(every[number] for number in numbers)


def clip_of(frames: Frames, where: str, *, stated: Stated = UNSTATED) -> Media:
    """Read the size from the headers of all frames, which must be of one size."""
    first = picture_of(frames[0], where, stated=stated)
    turn = transforms.stored(frames[0])[1]
    for frame in () if isinstance(frames, VideoFrames) else frames[1:]:
        other = picture_of(frame, where, stated=stated)
        if other.size != first.size:
            raise checks.DataError(
                f"{where}: {getattr(frame, 'name', frame)} is {other.size}, the first frame "
                f"{first.size} (height, width); the frames of a video are of one size"
            )
        if transforms.stored(frame)[1] != turn:
            raise checks.DataError(
                f"{where}: the EXIF tag of {frame!r} turns it, unlike the first frame; turn the pixels and "
                "drop the tag"
            )
    return replace(first, frames=frames)


def clip_in(folder: Path, where: str) -> tuple[list[str], Media]:
    """Return the clip whose frames are a folder's pictures, and their names."""
    names = listed(folder, where)
    return names, clip_of(frames_of(folder, names, where=where), where)


def visible(masklet: Masklet, where: str) -> Masklet:
    """Return a masklet that has a pixel in some frame; refuse any other."""
    if not any(m is not None and rle.area(m) for m in masklet):
        raise checks.DataError(f"{where}: no pixel in any frame; leave the object out")
    return masklet


def palette_masklets(folder: Path, names: Sequence[str], clip: Media, where: str) -> dict[int, Masklet]:
    """Read `<folder>/<frame>.png`, whose pixels are object numbers, and return each object's masklet by its
    number, in rising order.

    A frame without PNG is not annotated (None). An object that an annotated frame does not show is absent
    there. 255 is void, or object 1 where it is the only number. Raises DataError for numbers that can't be
    objects (grey levels, masks scaled with interpolation).
    """
    if not folder.is_dir():
        raise checks.DataError(f"{where}: there is no folder {folder} of annotations")
    there: dict[str, Path] = {}
    for path in folder.iterdir():
        if path.suffix.lower() == ".png" and there.setdefault(path.stem, path) != path:
            raise checks.DataError(f"{where}: {folder} holds {path.stem} twice, as .png and .PNG; keep one")
    if unknown := sorted(there.keys() - set(names)):
        raise checks.DataError(
            f"{where}: {there[unknown[0]]} annotates a frame that the clip doesn't have; correct its name"
        )
    files = [there.get(name, folder / f"{name}.png") for name in names]
    with ThreadPoolExecutor() as threads:  # Pillow decodes outside of Python's lock
        read = list(threads.map(lambda file: _objects(file, clip, where), files))
    per_frame = [None if frame is None else frame[0] for frame in read]
    numbers = {number for frame in per_frame if frame is not None for number in frame}
    if reason := object_numbers.fault(
        numbers, {number for frame in read if frame is not None for number in frame[1]}
    ):
        raise checks.DataError(f"{where}, {folder}: {reason}")
    # number in the PNGs of each object
    objects = (
        {1: object_numbers.VOID}
        if object_numbers.is_binary(numbers)
        else {n: n for n in sorted(numbers - {object_numbers.VOID})}
    )
    absent = rle.empty(*clip.size)
    return {
        n: tuple(None if frame is None else frame.get(pixel, absent) for frame in per_frame)
        for n, pixel in objects.items()
    }


def _objects(file: Path, clip: Media, where: str) -> tuple[dict[int, RLE], set[int]] | None:
    """Return the mask of every number but 0, void's as well, and the numbers that are not edges alone; None
    without the file."""
    if not file.is_file():
        return None
    pixels = _numbers(file, clip, where)
    numbers = np.flatnonzero(np.bincount(pixels.ravel()))
    return {int(n): rle.encode(pixels == n) for n in numbers if n}, object_numbers.with_inside(pixels)


def _numbers(file: Path, clip: Media, where: str) -> UInt8[np.ndarray, "H W"]:
    """Read a PNG of object numbers (palette or grey): 0 is background."""
    try:
        with Image.open(file) as picture:
            if picture.mode not in ("P", "L", "1"):
                raise checks.DataError(
                    f"{where}: {file} has Pillow's mode {picture.mode}; save object numbers as a palette or "
                    "grey PNG"
                )
            pixels = np.asarray(picture).astype(np.uint8)
    except (*transforms.CODEC_ERRORS, Image.DecompressionBombError) as error:
        if isinstance(error, checks.DataError):
            raise
        raise checks.DataError(f"{where}: {file} can't be read ({error}); fetch it again") from None
    if pixels.shape != clip.size:
        raise checks.DataError(
            f"{where}: {file} is {pixels.shape}, the frames {clip.size} (height, width); scale neither alone"
        )
    return pixels


def tracking_sample(name: str, masklets: Mapping[Any, Masklet], media: Media) -> Sample:
    """Return one sample of all objects of a clip or picture, whose numbers are in meta's `object_ids`. Each
    object's prompt is its mask in the first annotated frame that shows it."""
    return media.sample(
        sample_id=name,
        image_id=name,
        task="tracking",
        text="",
        masks=tuple(masklets.values()),
        meta={"object_ids": list(masklets)},
    )


def split_folders(path: Path, parts: Iterable[str]) -> list[str]:
    """Return the folders of `path` that hold all of `parts`: the splits of a data set."""
    needed = tuple(parts)
    return (
        sorted(p.name for p in path.iterdir() if all((p / part).is_dir() for part in needed))
        if path.is_dir()
        else []
    )
