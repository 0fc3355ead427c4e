"""A folder of grounded captions in GranD-f's layout (`*<split>.json`: file_name, caption, groundings) -> grounded_caption
samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ans_core import rle
from ans_core.data.formats import checks
from ans_core.types import Masklet, Sample

SPLITS = ("train", "val", "test")


class Grounding(checks.Record):
    token_positives: Annotated[list[int], Field(min_length=2, max_length=2)]
    """[start, end) characters of the caption."""
    rle_masks: Annotated[list[Any], Field(min_length=1)]


class Caption(checks.Record):
    file_name: str
    caption: str
    groundings: dict[str, Grounding]


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    checks.known_split(split, splits(path), path=path)
    file = _file(path, split)
    folder = checks.image_folder((path / "images", path.parent / "images"), where=str(path))
    faults = checks.Faults(file)
    samples = []
    for number, value in enumerate(checks.load_list(file)):
        with faults:
            samples.append(_sample(value, folder, name=name, number=number, where=f"{file}: record {number}"))
    faults.tell()
    return samples


def splits(path: Path) -> list[str]:
    found = [split for split in SPLITS if list(path.glob(f"*{split}.json"))]
    if not found:
        raise checks.DataError(f"{path}: no *train.json, *val.json or *test.json with grounded captions")
    return found


def _file(path: Path, split: str) -> Path:
    files = sorted(path.glob(f"*{split}.json"))
    if len(files) != 1:
        raise checks.DataError(f"{path}: expected one *{split}.json, found {[f.name for f in files]}; keep one in the folder")
    return files[0]


def _sample(value: Any, folder: Path, *, name: str, number: int, where: str) -> Sample:
    """Make a sample with phrases ordered by their start; of two that overlap, the later is left out (upstream trims likewise)."""
    record = checks.record(Caption, value, where=where)
    checks.text(record.caption, where=where)
    image = checks.inside(folder, record.file_name, where=where)
    height, width = checks.image_size(image, where=where)
    spans: list[tuple[int, int]] = []
    masks: list[Masklet] = []
    for phrase, grounding in sorted(record.groundings.items(), key=lambda item: item[1].token_positives):
        here = f"{where}, phrase {rle.short(phrase)}"
        start, end = grounding.token_positives
        if not 0 <= start < end <= len(record.caption):
            raise checks.DataError(
                f"{here}: token_positives {rle.short([start, end])} are not characters of the caption (length {len(record.caption)})"
            )
        made = rle.union([checks.mask(m, height=height, width=width, where=here) for m in grounding.rle_masks])
        if not spans or start >= spans[-1][1]:
            spans.append((start, end))
            masks.append((made,))
    return Sample(
        sample_id=str(number),
        dataset=name,
        image_id=image.stem,
        frames=(image,),
        height=height,
        width=width,
        task="grounded_caption",
        text=record.caption,
        masks=tuple(masks),
        phrases=tuple(spans),
    )
