"""SA-V -> one tracking sample per clip.

Training: `sav_000/sav_000001.mp4` beside `sav_000001_manual.json` (split "train") and `sav_000001_auto.json`
(split "auto"), anywhere below the folder; every fourth frame is annotated, the others are left out, as
Ref-SAV's loader does. Held out: `sav_val`, `sav_test` with `JPEGImages_24fps/<clip>/<frame>.jpg` and
`Annotations_6fps/<clip>/<object>/<frame>.png`; frames between the annotated ones are None.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from ans_core.data.formats import checks, clip_files
from ans_core.data.formats.davis import clips_in
from ans_core.data.formats.media import Media
from ans_core.pictures import rle
from ans_core.types import Masklet, Sample

STEP = 4
"""Videos are of 24 frames a second, annotations of 6."""
SUFFIX = {"train": "_manual.json", "auto": "_auto.json"}
PARTS = ("JPEGImages_24fps", "Annotations_6fps")
LAYOUT = f"videos with {' or '.join(SUFFIX.values())} and no folders {' and '.join(PARTS)}"


class Clip(checks.Record):
    video_id: str
    video_height: FiniteFloat | None = None
    video_width: FiniteFloat | None = None
    masklet: checks.Filled[Any]
    """[frame][object]: one RLE"""
    masklet_id: checks.Filled[checks.Id]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    faults = checks.Faults(path)
    if split in SUFFIX:
        for file in sorted(path.rglob(f"*{SUFFIX[split]}")):
            with faults:
                sample = _of_video(file)
                faults.once(f"clip {sample.image_id}", where=str(path))
                yield sample
    else:
        root = _held_out(path)[split]
        for clip in clips_in(root / PARTS[1]):
            with faults:
                yield _of_folders(root, clip)
    faults.tell()


def splits(path: Path) -> list[str]:
    names = [split for split, suffix in SUFFIX.items() if next(path.rglob(f"*{suffix}"), None)]
    return sorted([*names, *_held_out(path)])


def clip_of(file: Path, *, video: Path) -> tuple[Media, dict[Any, Masklet]]:
    """Read a clip's annotation: its annotated frames, and every object's masklet."""
    clip = checks.load(Clip, file)
    where = f"{file}: video {rle.short(clip.video_id)}"
    every = clip_files.video_frames(video, where)
    frames = every[::STEP][: len(clip.masklet)]
    if len(frames) < len(clip.masklet):
        raise checks.DataError(
            f"{where}: {len(clip.masklet)} annotated frames, one in {STEP}, are more than {video} has "
            f"({len(every)} frames); fetch it again"
        )
    stated = tuple(None if side is None else int(side) for side in (clip.video_height, clip.video_width))
    media = clip_files.clip_of(frames, where, stated=stated)  # type: ignore[arg-type]
    checks.once((f"{where}, object {rle.short(number)}", number) for number in clip.masklet_id)
    columns: list[list[Any]] = [[] for _ in clip.masklet_id]
    for place, masks in enumerate(clip.masklet):
        if not isinstance(masks, list) or len(masks) != len(columns):
            raise checks.DataError(
                f"{where}, frame {place}: {rle.short(masks)} is no list of a mask for each of "
                f"{len(columns)} objects"
            )
        for number, column, mask in zip(clip.masklet_id, columns, masks, strict=True):
            here = f"{where}, frame {place}, object {rle.short(number)}"
            column.append(media.some_mask(mask, here))
    return media, dict(zip(clip.masklet_id, map(tuple, columns), strict=True))


def _of_video(file: Path) -> Sample:
    video = file.with_name(
        file.name.removesuffix(SUFFIX["train"]).removesuffix(SUFFIX["auto"]) + clip_files.VIDEO
    )
    media, masklets = clip_of(file, video=video)
    seen = {
        n: clip_files.visible(masklet, f"{file}: object {rle.short(n)}") for n, masklet in masklets.items()
    }
    return clip_files.tracking_sample(video.stem, seen, media)


def _held_out(path: Path) -> dict[str, Path]:
    """Return the folder of every held-out split: sav_val is "val"."""
    roots = (
        [path]
        if all((path / part).is_dir() for part in PARTS)
        else [path / p for p in clip_files.split_folders(path, PARTS)]
    )
    return {root.resolve().name.removeprefix("sav_"): root for root in roots}


def _of_folders(root: Path, clip: str) -> Sample:
    where = f"{root}: clip {clip}"
    names, media = clip_files.clip_in(root / PARTS[0] / clip, where)
    masklets: dict[Any, Masklet] = {}
    for one in clips_in(root / PARTS[1] / clip):
        here = f"{where}, object {one}"
        objects = clip_files.palette_masklets(root / PARTS[1] / clip / one, names, media, here)
        if len(objects) != 1:
            raise checks.DataError(
                f"{here}: its PNGs show {len(objects)} objects ({list(objects)[:5]}); there is a folder for "
                "each, with one"
            )
        (masklets[one],) = objects.values()
    return clip_files.tracking_sample(clip, masklets, media)
