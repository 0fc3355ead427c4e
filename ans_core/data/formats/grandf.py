"""A folder of grounded captions in GranD-f's layout (`*<split>.json`: file_name, caption, groundings) -> grounded_caption
samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ans_core import rle
from ans_core.data.formats import checks
from ans_core.types import Masklet, Sample

SPLITS = ("train", "val", "test")


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    """Phrases are ordered by their start; where two overlap, the later one is left out (upstream trims likewise)."""
    checks.known_split(split, splits(path), path=path)
    file = _file(path, split)
    folder = checks.image_folder((path / "images", path.parent / "images"), where=str(path))
    samples = []
    for number, record in enumerate(checks.load_json(file)):
        where = f"{file}: record {number}"
        image = folder / checks.field(record, "file_name", where=where)
        height, width = checks.image_size(image, where=where)
        caption = checks.field(record, "caption", where=where)
        checks.text(caption, where=where)
        spans: list[tuple[int, int]] = []
        masks: list[Masklet] = []
        for start, end, rles in _groundings(record, caption, where=where):
            if not spans or start >= spans[-1][1]:
                spans.append((start, end))
                masks.append((rle.union([checks.mask(m, height=height, width=width, where=where) for m in rles]),))
        samples.append(
            Sample(
                sample_id=str(number),
                dataset=name,
                image_id=image.stem,
                frames=(image,),
                height=height,
                width=width,
                task="grounded_caption",
                text=caption,
                masks=tuple(masks),
                phrases=tuple(spans),
            )
        )
    return samples


def splits(path: Path) -> list[str]:
    found = [split for split in SPLITS if list(path.glob(f"*{split}.json"))]
    if not found:
        raise ValueError(f"{path}: no *train.json, *val.json or *test.json with grounded captions")
    return found


def _file(path: Path, split: str) -> Path:
    files = sorted(path.glob(f"*{split}.json"))
    if len(files) != 1:
        raise ValueError(f"{path}: expected one *{split}.json, found {[f.name for f in files]}; keep one in the folder")
    return files[0]


def _groundings(record: dict[str, Any], caption: str, *, where: str) -> list[tuple[int, int, list[Any]]]:
    """(start, end, masks) by start."""
    found = []
    for phrase, grounding in checks.field(record, "groundings", where=where).items():
        here = f"{where}, phrase {phrase!r}"
        start, end = checks.field(grounding, "token_positives", where=here)
        if not 0 <= start < end <= len(caption):
            raise ValueError(f"{here}: token_positives [{start}, {end}] are not characters of the caption (length {len(caption)})")
        rles = checks.field(grounding, "rle_masks", where=here)
        if not rles:
            raise ValueError(f"{here}: no mask; leave the phrase out of the groundings")
        found.append((start, end, rles))
    return sorted(found, key=lambda item: item[:2])
