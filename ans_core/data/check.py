"""Print what is in a data set on disk and what is wrong with it, and write a page with its pictures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ans_core.config import DataSource, load
from ans_core.data import DatasetEntry, existing
from ans_core.data.facts import Facts, facts
from ans_core.data.formats import FORMATS, NO_VAL, SPLITS, checks, training_format
from ans_core.data.formats.checks import DataError
from ans_core.data.index import SampleIndex, nameless_index, picture_keys
from ans_core.data.mixture import paired
from ans_core.data.near_duplicates import near_duplicates
from ans_core.data.pictures import check_pictures
from ans_core.data.report import refuse_other_page, write_report
from ans_core.types import ImageRef, Sample

FAULTY = 1
"""Exit status for a data set that can't be trained on."""
GUESSED = ("train", "val", "test")
"""Splits that are read where faults keep the data set from telling its own."""
TURNED = (
    "{count:,} pictures have an EXIF tag that turns them, as {example}. They are shown upright, and masks "
    "of the stored pixels are turned along; masks count as of the upright picture only where the annotation "
    "states its size. Look at them (`ans data show`); if they lie wrong, turn the pixels, drop the tag and "
    "annotate these again"
)
NO_IDENTITIES = (
    "split {split!r}: {count:,} masks join all of a category in a clip, since the annotation has no "
    "instance_id or track_id. They teach what the category's name means; the stage `memory` leaves them "
    "out: give each object a number of its own, the same in every frame"
)
SHOWN = 5
"""Pairs of pictures that are named."""


def named(name_or_path: str, data_format: str | None, root: Path) -> tuple[str, Path, str]:
    """Return (name, path, format) of a data set of params.yaml, or of a path; ValueError if it is neither."""
    path, settings = Path(name_or_path), root / "params.yaml"
    sources: dict[str, DataSource] = {}
    if settings.exists():
        config = load(settings)
        listed = (*config.prepare.sources, *config.evaluate.sources, *config.agent.sources)
        sources = {source.name: source for source in listed}
    if source := sources.get(name_or_path):
        form = data_format or source.format
        return source.name, existing(form, root / source.path, name=source.name), form
    if not path.exists():
        raise ValueError(
            f"{path} does not exist, and params.yaml has no data set of that name; it has {sorted(sources)}"
        )
    form, name = data_format or training_format(path), path.resolve().name
    return name, existing(form, path, name=name), form


def check(name: str, path: Path, form: str, split: str | None, *, pixels: bool, page: Path) -> int:
    """Read a data set as training would; with `pixels` also decode and compare its pictures. The exit status
    tells whether anything is wrong. `page` is written with counts, pictures and everything that was found; raises ValueError
    where another one is there."""
    refuse_other_page(page)
    read, present, wrong, turned = read_all(name, path, form, split, pixels=pixels, index_folder=page.parent)
    facts_of = {part: facts(samples) for part, samples in read.items()}
    noted = warnings(read, present) + [
        NO_IDENTITIES.format(split=part, count=of.joined) for part, of in facts_of.items() if of.joined
    ]
    if turned:
        noted.append(TURNED.format(count=len(turned), example=_name_of(turned[0])))
    if pixels:
        noted += alike(read)
    print(f"{path}, format {form}")
    for part, of in facts_of.items():
        print("\n".join(summary(part, of)))
    for line in noted:
        print(f"warning: {line}")
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if not wrong:
        print("no fault found" if pixels else "no fault found (pictures were not decoded)")
    samples, facts_by_entry = {}, {}
    for part, of in facts_of.items():
        if of.samples:
            entry = DatasetEntry(name=name, format=form, path=str(path), split=part, kind="extra")
            samples[entry], facts_by_entry[entry] = read[part], of
    page.parent.mkdir(parents=True, exist_ok=True)
    write_report(page, samples, errors=wrong, warnings=noted, pictures=pixels, collected=facts_by_entry)
    print(f"counts and pictures: {page}")
    return FAULTY if wrong else 0


def read_all(
    name: str, path: Path, form: str, split: str | None, *, pixels: bool, index_folder: Path
) -> tuple[dict[str, SampleIndex], list[str], list[str], list[ImageRef]]:
    """Read every split, or one, into indexes in `index_folder`. Return the samples of those without fault, the
    splits of the data set, all faults of the others, and pictures that are shown turned."""
    wrong: dict[str, None] = {}
    turned: list[ImageRef] = []
    read: dict[str, SampleIndex] = {}
    try:
        present = SPLITS[form](path)
    except DataError as error:
        present = []
        wrong |= dict.fromkeys(error.faults)
    for part in [split] if split else present or GUESSED:
        try:
            with (
                tqdm(desc=f"read {part}", unit=" records", mininterval=1) as bar,
                checks.counting(bar.update),
            ):
                samples = nameless_index(
                    FORMATS[form](path, name=name, split=part), dataset=name, parent=index_folder
                )
            if pixels:
                turned += check_pictures(samples, where=f"{path}, split {part!r}")
            read[part] = samples
        except checks.NoSplit as error:
            if present:
                wrong[str(error)] = None
        except DataError as error:
            wrong |= dict.fromkeys(error.faults)
    return ({} if wrong and not present else read), present, list(wrong), turned


def summary(split: str, of: Facts) -> list[str]:
    """Return counts, sizes, mask areas and text lengths of a split."""
    if not of.samples:
        return [f"split {split!r}: no samples"]
    sizes = sorted(of.sizes, key=lambda size: size[0] * size[1])
    lines = [
        f"split {split!r}: {of.samples:,} samples "
        f"({', '.join(f'{task} {n:,}' for task, n in sorted(of.tasks.items()))})",
        f"  {sum(of.frames.values()):,} pictures, "
        f"{' to '.join(dict.fromkeys(f'{w} x {h}' for w, h in (sizes[0], sizes[-1])))} pixels",
        f"  texts of {min(of.words)} to {max(of.words)} words, median {statistics.median(of.words):g}",
    ]
    if lengths := sorted(length for length in of.frames.values() if length > 1):
        lines.append(
            f"  {len(lengths):,} clips of {lengths[0]} to {lengths[-1]} frames, median "
            f"{statistics.median(lengths):g}"
        )
    if of.areas:
        lines.append(
            f"  {len(of.areas):,} masks, median area {statistics.median(of.areas):.1%} of the picture"
        )
    if of.absent or of.unknown:
        lines.append(
            f"  {of.absent:,} times an object is absent from a frame, {of.unknown:,} times a frame is not "
            "annotated"
        )
    if of.without:
        lines.append(f"  {of.without:,} expressions that nothing in the picture fits")
    return lines


def warnings(read: Mapping[str, Sequence[Sample]], present: Sequence[str]) -> list[str]:
    """Return warnings about things that may be intended but mostly are not."""
    learned = "train" in present and ("train" not in read or paired(read["train"]).any())
    lines = [NO_VAL] if learned and "val" not in present else []
    pictures = {split: picture_keys(samples) for split, samples in read.items()}
    for one, other in combinations(pictures, 2):
        shared, first, _ = np.intersect1d(pictures[one], pictures[other], return_indices=True)
        if len(shared):
            example = _name_of(read[one][int(first.min())].frames[0])
            lines.append(
                f"{len(shared):,} pictures are in {one!r} and in {other!r}, as {example}: what is measured "
                "there was trained on"
            )
    return lines


def alike(read: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Return a warning for every two splits with pictures that look alike."""
    lines = []
    for (one, other), pairs in near_duplicates(read).items():
        if not pairs:
            continue
        named_pairs = "; ".join(f"{_name_of(a)} and {_name_of(b)}" for a, b in pairs[:SHOWN])
        lines.append(
            f"{len(pairs):,} pictures of {other!r} look like one of {one!r}: "
            f"{named_pairs}{' ...' if len(pairs) > SHOWN else ''}"
        )
    return lines


def _name_of(ref: ImageRef) -> str:
    return f"an embedded one of {len(ref):,} bytes" if isinstance(ref, bytes) else str(ref)
