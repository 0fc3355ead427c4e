"""Print what is in a data set on disk and what is wrong with it, and write a page with its pictures."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from ans_core import rle
from ans_core.config import DataSource, load
from ans_core.data import DatasetEntry
from ans_core.data.formats import FORMATS, NO_VAL, SPLITS, checks, infer
from ans_core.data.formats.checks import DataError
from ans_core.data.index import picture_key
from ans_core.data.near_duplicates import near_duplicates
from ans_core.data.pictures import check_pictures
from ans_core.data.report import write_report
from ans_core.types import ImageRef, Sample

FAULTY = 1
"""Exit status for a data set that can't be trained on."""
GUESSED = ("train", "val", "test")
"""Splits that are read where faults keep the data set from telling its own."""
SHOWN = 5
"""Pairs of pictures that are named."""


def named(name_or_path: str, data_format: str | None, root: Path) -> tuple[str, Path, str]:
    """Return (name, path, format) of a data set of params.yaml, or of a path; ValueError if it is neither."""
    path, settings = Path(name_or_path), root / "params.yaml"
    known: dict[str, DataSource] = {}
    if settings.exists():
        config = load(settings)
        known = {source.name: source for source in (*config.prepare.sources, *config.evaluate.sources)}
    if source := known.get(name_or_path):
        return source.name, root / source.path, data_format or source.format
    if not path.exists():
        raise ValueError(f"{path} does not exist, and params.yaml has no data set of that name; it has {sorted(known)}")
    form = data_format or infer(path)
    if form not in FORMATS:
        raise ValueError(f"no format named {form!r}; ans_core/data/formats has {sorted(FORMATS)}")
    return path.resolve().name, path, form


def check(name: str, path: Path, form: str, split: str | None, *, pixels: bool, page: Path) -> int:
    """Read a data set as training would; with `pixels` also decode and compare its pictures. The exit status tells whether anything is
    wrong. `page` is written with counts, pictures and everything that was found."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; correct the path in params.yaml")
    read, present, wrong = read_all(name, path, form, split, pixels=pixels)
    noted = warnings(read, present)
    if pixels:
        noted += alike(read)
    print(f"{path}, format {form}")
    for part, samples in read.items():
        print("\n".join(summary(part, samples)))
    for line in noted:
        print(f"warning: {line}")
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if not wrong:
        print("no fault found" if pixels else "no fault found (pictures were not decoded)")
    page.parent.mkdir(parents=True, exist_ok=True)
    entries = {DatasetEntry(name=name, format=form, path=str(path), split=part, kind="extra"): s for part, s in read.items() if s}
    write_report(page, entries, errors=wrong, warnings=noted, pictures=pixels)
    print(f"counts and pictures: {page}")
    return FAULTY if wrong else 0


def read_all(name: str, path: Path, form: str, split: str | None, *, pixels: bool) -> tuple[dict[str, list[Sample]], list[str], list[str]]:
    """Read every split, or one. Return the samples of those without fault, the splits of the data set, and all faults of the others."""
    wrong: dict[str, None] = {}
    read: dict[str, list[Sample]] = {}
    try:
        present = SPLITS[form](path)
    except DataError as error:
        present = []
        wrong |= dict.fromkeys(error.faults)
    for part in [split] if split else present or GUESSED:
        try:
            with tqdm(desc=f"read {part}", unit=" records", mininterval=1) as bar, checks.counting(bar.update):
                samples = list(FORMATS[form](path, name=name, split=part))
            if pixels:
                check_pictures(samples, where=f"{path}, split {part!r}")
            read[part] = samples
        except checks.NoSplit as error:
            if present:
                wrong[str(error)] = None
        except DataError as error:
            wrong |= dict.fromkeys(error.faults)
    return ({} if wrong and not present else read), present, list(wrong)


def summary(split: str, samples: Sequence[Sample]) -> list[str]:
    """Return counts, sizes, mask areas and text lengths of a split."""
    if not samples:
        return [f"split {split!r}: no samples"]
    tasks = Counter(sample.task for sample in samples)
    sizes = sorted({(s.width, s.height) for s in samples}, key=lambda size: size[0] * size[1])
    words = sorted(len(s.text.split()) for s in samples)
    areas, absent, unknown = mask_areas(samples)
    clips = {sample.frames for sample in samples}
    lines = [
        f"split {split!r}: {len(samples):,} samples ({', '.join(f'{task} {n:,}' for task, n in sorted(tasks.items()))})",
        f"  {sum(map(len, clips)):,} pictures, {' to '.join(dict.fromkeys(f'{w} x {h}' for w, h in (sizes[0], sizes[-1])))} pixels",
        f"  texts of {words[0]} to {words[-1]} words, median {statistics.median(words):g}",
    ]
    if lengths := sorted(len(frames) for frames in clips if len(frames) > 1):
        lines.append(f"  {len(lengths):,} clips of {lengths[0]} to {lengths[-1]} frames, median {statistics.median(lengths):g}")
    if areas:
        lines.append(f"  {len(areas):,} masks, median area {statistics.median(areas):.1%} of the picture")
    if absent or unknown:
        lines.append(f"  {absent:,} times an object is absent from a frame, {unknown:,} times a frame is not annotated")
    without = sum(not s.masks for s in samples if s.task == "referring")
    return [*lines, *([f"  {without:,} expressions that nothing in the picture fits"] if without else [])]


def mask_areas(samples: Sequence[Sample]) -> tuple[list[float], int, int]:
    """Return every visible mask's share of its picture, and how often an object is absent from a frame or a frame is not annotated."""
    areas, absent, unknown = [], 0, 0
    for sample in samples:
        for mask in (mask for masklet in sample.masks for mask in masklet):
            if mask is None:
                unknown += 1
            elif pixels := rle.area(mask):
                areas.append(pixels / (sample.width * sample.height))
            else:
                absent += 1
    return areas, absent, unknown


def warnings(read: Mapping[str, Sequence[Sample]], present: Sequence[str]) -> list[str]:
    """Return warnings about things that may be intended but mostly are not."""
    lines = [NO_VAL] if "train" in present and "val" not in present else []
    pictures = {split: {picture_key(sample) for sample in samples} for split, samples in read.items()}
    names = list(pictures)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            if shared := pictures[one] & pictures[other]:
                example = next(str(key[0]) for key in shared) if all(isinstance(k[0], (Path, str)) for k in shared) else "embedded"
                lines.append(
                    f"{len(shared):,} pictures are in {one!r} and in {other!r}, as {example}: what is measured there was trained on"
                )
    return lines


def alike(read: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Return a warning for every two splits with pictures that look alike."""
    found = near_duplicates(read)
    lines = []
    for one, other in dict.fromkeys(pair.splits for pair in found):
        pairs = [pair.pictures for pair in found if pair.splits == (one, other)]
        named_pairs = "; ".join(f"{_told(a)} and {_told(b)}" for a, b in pairs[:SHOWN])
        lines.append(f"{len(pairs):,} pictures of {other!r} look like one of {one!r}: {named_pairs}{' ...' if len(pairs) > SHOWN else ''}")
    return lines


def _told(ref: ImageRef) -> str:
    return f"an embedded one of {len(ref):,} bytes" if isinstance(ref, bytes) else str(ref)
