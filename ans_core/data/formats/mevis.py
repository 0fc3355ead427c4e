"""A MeViS-type folder (`<split>/meta_expressions.json`, `mask_dict.json`, `JPEGImages/<video>/<frame>`) -> referring samples of
videos.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ans_core import rle
from ans_core.data.formats import checks
from ans_core.types import RLE, Masklet, Sample

SUFFIXES = (".jpg", ".png")


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    """A null in mask_dict means that the object is not to be seen in that frame: area 0, as the benchmark's evaluation counts
    it.
    """
    checks.known_split(split, splits(path), path=path)
    meta_file, masks_file = path / split / "meta_expressions.json", path / split / "mask_dict.json"
    mask_dict = checks.load_json(masks_file)
    samples = []
    for video, record in checks.field(checks.load_json(meta_file), "videos", where=str(meta_file)).items():
        where = f"{meta_file}: video {video}"
        frames = _frames(path / split / "JPEGImages" / video, checks.field(record, "frames", where=where), where=where)
        height, width = checks.image_size(frames[0], where=where)
        for frame in frames[1:]:
            if (size := checks.image_size(frame, where=where)) != (height, width):
                raise ValueError(
                    f"{where}: {frame.name} is {size}, the first frame {(height, width)}; the frames of a video are of one size"
                )
        for number, expression in checks.field(record, "expressions", where=where).items():
            here = f"{where}, expression {number}"
            ids = [str(anno) for anno in checks.field(expression, "anno_id", where=here)]
            samples.append(
                Sample(
                    sample_id=f"{video}_{number}",
                    dataset=name,
                    image_id=video,
                    frames=frames,
                    height=height,
                    width=width,
                    task="referring",
                    text=checks.text(expression.get("exp"), where=here),
                    masks=tuple(
                        _masklet(mask_dict, anno, len(frames), height=height, width=width, where=f"{masks_file}: {anno}") for anno in ids
                    ),
                    meta={"kind": expression["kind"]} if "kind" in expression else {},
                )
            )
    return samples


def splits(path: Path) -> list[str]:
    found = sorted(p.parent.name for p in path.glob("*/meta_expressions.json"))
    if not found:
        raise ValueError(f"{path}: no <split>/meta_expressions.json")
    return found


def _frames(folder: Path, names: list[str], *, where: str) -> tuple[Path, ...]:
    if not names:
        raise ValueError(f"{where}: the list of frames is empty")
    suffix = next((s for s in SUFFIXES if (folder / f"{names[0]}{s}").is_file()), SUFFIXES[0])
    return tuple(folder / f"{frame}{suffix}" for frame in names)


def _masklet(mask_dict: dict[str, Any], anno: str, frames: int, *, height: int, width: int, where: str) -> Masklet:
    if anno not in mask_dict:
        raise ValueError(f"{where} is missing; meta_expressions.json and mask_dict.json must be of one release")
    if len(mask_dict[anno]) != frames:
        raise ValueError(f"{where} has {len(mask_dict[anno])} entries, the video {frames} frames")
    absent = rle.empty(height, width)
    masklet: list[RLE] = [absent if m is None else rle.from_annotation(m, height=height, width=width, where=where) for m in mask_dict[anno]]
    if not any(rle.area(m) for m in masklet):
        raise ValueError(f"{where}: no pixel in any frame; leave the object out")
    return tuple(masklet)
