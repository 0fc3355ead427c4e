"""Draw samples of a data set, with their masks, as PNGs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from PIL import Image

from ans_core.data.formats import FORMATS, SPLITS
from ans_core.data.index import SampleIndex, nameless_index
from ans_core.data.report import panel
from ans_core.types import Sample
from ans_core.written import refuse_foreign, write_atomically

SAMPLES = "samples.jsonl"
SIDE = 640
"""Pixels of a picture's longer side."""


def show(
    name: str, path: Path, form: str, split: str | None, *, count: int, seed: int, out: Path
) -> list[Path]:
    """Draw `count` samples of a split (None: of every one), chosen by the seed. Write pictures and
    `samples.jsonl` with the texts; those of an earlier run in `out` are removed. Raises ValueError where `out`
    holds files of others alone."""
    refuse_foreign(out, SAMPLES, {"picture", "split", "sample_id"})
    chosen: list[tuple[str, SampleIndex, int]] = []
    for part in [split] if split else SPLITS[form](path):
        samples = nameless_index(FORMATS[form](path, name=name, split=part), dataset=name, parent=out)
        numbers = sorted(Random(seed).sample(range(len(samples)), min(count, len(samples))))
        chosen += [(part, samples, number) for number in numbers]
    if (out / SAMPLES).exists():
        for line in (out / SAMPLES).read_text(encoding="utf-8").splitlines():
            (out / Path(json.loads(line)["picture"]).name).unlink(missing_ok=True)
    records = [
        {"picture": f"{part}_{number:06d}.png", "split": part, **texts_of(samples[number])}
        for part, samples, number in chosen
    ]
    # before the pictures: they are found by it
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_atomically(out / SAMPLES, lines)
    written = []
    for record, (_, samples, number) in zip(records, chosen, strict=True):
        written.append(out / str(record["picture"]))
        Image.fromarray(panel(samples[number], SIDE)).save(written[-1])
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
