"""Folders of frames and palette PNGs (DAVIS, MOSE, YouTube-VOS) -> one tracking sample per clip.

DAVIS: `JPEGImages/480p/<clip>/<frame>.jpg`, `Annotations/480p/...png`, lists of clips in
`ImageSets/.../<split>.txt`. MOSE, YouTube-VOS: `<split>/JPEGImages/<clip>/`, `<split>/Annotations/<clip>/`.
Both folders without lists: one clip in five is "val", by a hash of its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ans_core.data.formats import checks, clip_files
from ans_core.data.formats.plain import split_by_image
from ans_core.types import Sample

PARTS = ("JPEGImages", "Annotations")
QUALITIES = ("480p", "Full-Resolution", "1080p")
"""Folders between PARTS and the clips in DAVIS; the first that exists is read."""
LISTS = ("2017", "2016", "", "480p")
"""Folders of ImageSets; the first that holds lists is read. DAVIS 2016 alone has 480p, whose lines are a
frame and its PNG."""


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split. A pixel's value is the object's number in the whole clip; 255 (void) becomes
    background, unless masks are 0 and 255 alone (DAVIS 2016). A frame without PNG is not annotated, as all
    but the first of held-out splits."""
    clips = splits(path)
    root = path / split if (path / split / PARTS[0]).is_dir() else path
    pictures, annotations = (quality_folder(root / part) for part in PARTS)
    faults = checks.Faults(path)
    for clip in clips[split]:
        where = f"{path}: clip {clip}"
        with faults:
            names, media = clip_files.clip_in(checks.inside(pictures, clip, where=where), where)
            masklets = clip_files.palette_masklets(annotations / clip, names, media, where)
            if not masklets:
                raise checks.DataError(
                    f"{where}: {annotations / clip} shows no object, only background; leave the clip out"
                )
            yield clip_files.tracking_sample(clip, masklets, media)
    faults.tell()


def splits(path: Path) -> dict[str, list[str]]:
    """Return the clips of every split."""
    if folders := clip_files.split_folders(path, PARTS):
        return {split: clips_in(quality_folder(path / split / PARTS[1])) for split in folders}
    if not all((path / part).is_dir() for part in PARTS):
        raise checks.DataError(
            f"{path} holds neither {PARTS[0]} and {PARTS[1]} nor a folder with both; see docs/your-data.md"
        )
    if lists := next(
        (files for part in LISTS if (files := sorted((path / "ImageSets" / part).glob("*.txt")))), []
    ):
        return {file.stem: listed_clips(file) for file in lists}
    clips: dict[str, list[str]] = {}
    for clip in clips_in(quality_folder(path / PARTS[1])):
        clips.setdefault(split_by_image(clip), []).append(clip)
    return clips


def quality_folder(folder: Path) -> Path:
    return next((folder / quality for quality in QUALITIES if (folder / quality).is_dir()), folder)


def clips_in(folder: Path) -> list[str]:
    clips = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if not clips:
        raise checks.DataError(f"{folder} holds no clip (a folder of PNGs)")
    return clips


def listed_clips(file: Path) -> list[str]:
    """Read a list of clips, one name a line, or one path /JPEGImages/480p/<clip>/<frame>.jpg a frame."""
    words = [line.split()[0] for line in checks.load_text(file).splitlines() if line.strip()]
    clips = (
        list(dict.fromkeys(Path(word).parent.name for word in words)) if words and "/" in words[0] else words
    )
    if not clips:
        raise checks.DataError(f"{file} is empty; write one clip's name a line")
    checks.once((f"{file}: clip {clip}", clip) for clip in clips)
    return clips
