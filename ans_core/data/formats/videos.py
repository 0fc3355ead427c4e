"""A folder with `manifest.jsonl` of annotated clips (frames, objects, `masks.json`) -> one referring sample per object, its
name as text; for evaluation.
"""

from __future__ import annotations

from pathlib import Path

from ans_core import rle
from ans_core.data.formats import checks
from ans_core.types import Sample


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    """The one split is "val". A null mask means that the frame is not annotated, an area of 0 that the object is absent."""
    file = path / "manifest.jsonl"
    checks.known_split(split, splits(path), path=file)
    records = checks.load_json_lines(file)
    checks.indexed((record for _, record in records), "video_id", where=str(file))
    samples = []
    for line, record in records:
        where = f"{file}: line {line} ({record['video_id']})"
        frames = tuple(path / checks.field(frame, "file", where=where) for frame in checks.field(record, "frames", where=where))
        sizes = {checks.image_size(frame, where=where) for frame in frames}
        if len(sizes) != 1:
            raise ValueError(f"{where}: frames of sizes {sorted(sizes)}; a video needs at least one frame and all of one size")
        height, width = sizes.pop()
        masks_file = path / checks.field(record, "masks_file", where=where)
        masks = checks.field(checks.load_json(masks_file), "masks", where=str(masks_file))
        objects = checks.indexed(checks.field(record, "objects", where=where), "obj_id", where=where)
        for number, described in objects.items():
            here = f"{masks_file}: object {number}"
            entries = checks.field(masks, str(number), where=here)
            if len(entries) != len(frames):
                raise ValueError(f"{here} has {len(entries)} entries, the clip {len(frames)} frames")
            masklet = tuple(m and rle.from_annotation(m, height=height, width=width, where=here) for m in entries)
            if not any(m and rle.area(m) for m in masklet):
                raise ValueError(f"{here}: no pixel in any frame; leave the object out")
            samples.append(
                Sample(
                    sample_id=f"{record['video_id']}_{number}",
                    dataset=name,
                    image_id=record["video_id"],
                    frames=frames,
                    height=height,
                    width=width,
                    task="referring",
                    text=checks.text(described.get("caption") or described.get("name"), where=f"{where}, object {number}"),
                    masks=(masklet,),
                    meta={"category": described["category"]} if described.get("category") else {},
                )
            )
    return samples


def splits(path: Path) -> list[str]:
    if not (path / "manifest.jsonl").is_file():
        raise ValueError(f"{path} holds no manifest.jsonl")
    return ["val"]
