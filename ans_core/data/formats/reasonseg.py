"""ReasonSeg (`<split>/<picture>.jpg` with `<picture>.json` beside it: text, is_sentence, shapes) -> referring
samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from ans_core import prompts
from ans_core.data.formats import checks
from ans_core.data.formats.media import Media, picture_of
from ans_core.pictures import rle
from ans_core.types import RLE, Sample

ENCODING = "cp1252"
"""Of the files that are not UTF-8."""
OLD = "flag"
"""A label that means nothing any more."""

Point = checks.Pair[float]
LAYOUT = "<split>/<picture>.jpg with a <picture>.json beside it"


class Shape(checks.Record):
    label: str
    points: list[Point]


class Query(checks.Record):
    text: checks.Filled[str]
    is_sentence: bool
    shapes: checks.Filled[Shape]


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split: one sample per query. A query that is a sentence is asked as it is, with LISA's words
    after it."""
    faults = checks.Faults(path / split)
    files = sorted((path / split).glob("*.json"))
    if bare := {file.stem for file in (path / split).glob("*.jpg")} - {file.stem for file in files}:
        faults.notes[f"pictures have no .json and are left out, as {min(bare)}.jpg"] += len(bare)
    for file in files:
        with faults:
            picture = picture_of(file.with_suffix(".jpg"), str(file))
            query = checks.load(Query, file, encoding=ENCODING)
            mask = _mask(query.shapes, picture, str(file), faults=faults)
            for number, text in enumerate(query.text):
                words = checks.text(text, f"{file}, text {number}")
                yield picture.sample(
                    sample_id=f"{file.stem}_{number}",
                    image_id=file.stem,
                    task="referring",
                    text=prompts.SENTENCE_QUESTION.format(text=words) if query.is_sentence else words,
                    masks=((mask,),),
                    meta={"kind": "sentence" if query.is_sentence else "phrase"},
                )
    faults.tell()


def splits(path: Path) -> list[str]:
    files = (file for file in path.glob("*/*.json") if file.with_suffix(".jpg").is_file())
    return sorted({file.parent.name for file in files})


def _mask(shapes: list[Shape], picture: Media, where: str, *, faults: checks.Faults) -> RLE:
    """Paint the shapes, the larger first, as LISA does: a target inside a region to be ignored counts, one
    under it does not."""
    labelled = []
    for number, shape in enumerate(shapes):
        if len(shape.points) < 3:
            faults.notes["shapes of fewer than 3 points are left out"] += 1
        elif shape.label.lower() != OLD:
            polygon = [value for point in shape.points for value in point]
            mask = picture.some_mask([polygon], f"{where}, shape {number}")
            labelled.append((mask, shape.label.lower()))
    target: Bool[np.ndarray, "H W"] = np.zeros(picture.size, bool)
    for mask, label in sorted(labelled, key=lambda shape: -rle.area(shape[0])):
        target[rle.decode(mask)] = "ignore" not in label
    if not target.any():
        raise checks.DataError(f"{where}: no pixel is labelled as target; draw it or leave the picture out")
    return rle.encode(target)
