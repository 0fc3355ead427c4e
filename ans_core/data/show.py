"""Draw samples of a data set, with their masks, as PNGs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from PIL import Image

from ans_core.data.formats import FORMATS, SPLITS
from ans_core.data.index import nameless_index
from ans_core.data.report import panel
from ans_core.types import Sample

SIDE = 640
"""Pixels of a picture's longer side."""


def show(
    name: str, path: Path, form: str, split: str | None, *, count: int, seed: int, out: Path
) -> list[Path]:
    """Draw `count` samples of a split (None: of every one), chosen by the seed. Write pictures and
    `samples.jsonl` with the texts."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with (out / "samples.jsonl").open("w", encoding="utf-8") as lines:
        for part in [split] if split else SPLITS[form](path):
            samples = nameless_index(FORMATS[form](path, name=name, split=part), dataset=name, parent=out)
            for number in sorted(Random(seed).sample(range(len(samples)), min(count, len(samples)))):
                file = out / f"{part}_{number:06d}.png"
                Image.fromarray(panel(samples[number], SIDE)).save(file)
                record = {"picture": file.name, "split": part, **texts_of(samples[number])}
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
                written.append(file)
    return written


def texts_of(sample: Sample) -> dict[str, object]:
    """Return what a sample says in words."""
    record: dict[str, object] = {
        "sample_id": sample.sample_id,
        "task": sample.task,
        "text": sample.text,
        "objects": len(sample.masks),
    }
    if sample.question is not None:
        record["question"] = sample.question
    if sample.phrases:
        record["phrases"] = [sample.text[start:end] for start, end in sample.phrases]
    return record | {"size": [sample.width, sample.height], "frames": len(sample.frames), "meta": sample.meta}
