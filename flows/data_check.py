"""Print what is in a data set on disk and what is wrong with it."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ans_core import rle
from ans_core.data.formats import FORMATS, NO_VAL, SPLITS, infer
from ans_core.data.formats.checks import DataError
from ans_core.data.index import picture_key
from ans_core.data.pictures import check_pictures
from ans_core.types import Sample

FAULTY = 1
"""Exit status for a data set that can't be trained on."""


def check(path: Path, data_format: str | None, split: str | None, *, pixels: bool) -> int:
    """Read a data set as training would; with `pixels` also decode its pictures. The exit status tells whether anything is wrong."""
    form = data_format or infer(path)
    if form not in FORMATS:
        raise ValueError(f"no format named {form!r}; ans_core/data/formats has {sorted(FORMATS)}")
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    wrong: dict[str, None] = {}
    read: dict[str, list[Sample]] = {}
    try:
        present = SPLITS[form](path)
        for name in [split] if split else present:
            try:
                read[name] = FORMATS[form](path, name=path.name, split=name)
                if pixels:
                    check_pictures(read[name], where=f"{path}, split {name!r}")
            except DataError as error:
                wrong[str(error)] = None
    except DataError as error:
        present, wrong[str(error)] = [], None
    print(f"{path}, format {form}")
    for name, samples in read.items():
        print("\n".join(summary(name, samples)))
    for line in warnings(read, present):
        print(f"warning: {line}")
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if not wrong:
        print("no fault found" if pixels else "no fault found (pictures were not decoded)")
    return FAULTY if wrong else 0


def summary(split: str, samples: Sequence[Sample]) -> list[str]:
    """Return counts, sizes, mask areas and text lengths of a split."""
    tasks = Counter(sample.task for sample in samples)
    sizes = sorted({(s.width, s.height) for s in samples}, key=lambda size: size[0] * size[1])
    words = sorted(len(s.text.split()) for s in samples)
    areas = [rle.area(m) / (s.width * s.height) for s in samples for masklet in s.masks for m in masklet if m is not None]
    pictures = {frame for sample in samples for frame in sample.frames}
    lines = [
        f"split {split!r}: {len(samples):,} samples ({', '.join(f'{task} {n:,}' for task, n in sorted(tasks.items()))})",
        f"  {len(pictures):,} pictures, {' to '.join(dict.fromkeys(f'{w} x {h}' for w, h in (sizes[0], sizes[-1])))} pixels",
        f"  texts of {words[0]} to {words[-1]} words, median {statistics.median(words):g}",
    ]
    without = sum(not s.masks for s in samples if s.task == "referring")
    if areas:
        lines.append(f"  {len(areas):,} masks, median area {statistics.median(areas):.1%} of the picture")
    return [*lines, *([f"  {without:,} expressions that nothing in the picture fits"] if without else [])]


def warnings(read: Mapping[str, Sequence[Sample]], present: Sequence[str]) -> list[str]:
    """Return warnings about things that may be intended but mostly are not."""
    lines = [NO_VAL] if "train" in present and "val" not in present else []
    pictures = {split: {picture_key(sample) for sample in samples} for split, samples in read.items()}
    names = list(pictures)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            if shared := pictures[one] & pictures[other]:
                example = next(str(key[0]) for key in shared) if all(isinstance(k[0], Path) for k in shared) else "embedded"
                lines.append(
                    f"{len(shared):,} pictures are in {one!r} and in {other!r}, as {example}: what is measured there was trained on"
                )
    return lines
