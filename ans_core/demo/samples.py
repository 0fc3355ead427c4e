"""The held-out pictures and clips of a run, as questions that its model was not trained on."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ans_core import data
from ans_core.benchmarks import BENCHMARKS
from ans_core.demo.sources import Source, of_sample
from ans_core.types import RLE, Sample

HELD_OUT = ("test", "val")
"""Splits that no training saw, the better one first."""
EACH = 3
"""Samples of a data set, with different pictures."""


@dataclass(frozen=True, kw_only=True)
class Example:
    source: Source
    question: str
    """As the benchmark asks it."""
    regions: tuple[RLE, ...]
    """Visual prompts of the question."""
    caption: str
    """Below its thumbnail."""


def held_out(model: Path) -> list[Example]:
    """Return a few samples of every data set of the run that made `model`; none for a checkpoint without a
    run's data beside it. A data set that can't be read any more is named on stderr and left out."""
    prepared = model.parent / "data"
    if not (prepared / "datasets.json").is_file():
        return []
    examples = []
    for entry in _entries(prepared):
        try:
            examples += [
                _example(sample)
                for sample in islice(_of_other_pictures(data.read_entry(prepared, entry)), EACH)
            ]
        except ValueError as error:
            print(f"no samples of {entry.name}: {error}", file=sys.stderr)
    return examples


def _entries(prepared: Path) -> list[data.DatasetEntry]:
    """Return the `test` split of every data set, or `val` where it has no other that is held out."""
    by_name: dict[str, dict[str, data.DatasetEntry]] = defaultdict(dict)
    for entry in data.read_entries(prepared):
        by_name[entry.name][entry.split] = entry
    best = [[splits[split] for split in HELD_OUT if split in splits] for splits in by_name.values()]
    return [entries[0] for entries in best if entries]


def _of_other_pictures(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the first sample that can be asked of every picture. Those with nothing to find come too: a model
    must say so."""
    seen = set()
    for sample in samples:
        if sample.image_id not in seen and sample.task in BENCHMARKS:
            seen.add(sample.image_id)
            yield sample


def _example(sample: Sample) -> Example:
    source = of_sample(sample)
    benchmark = "video" if source.is_clip and sample.task == "referring" else sample.task
    request = BENCHMARKS[benchmark].request(sample)
    question = request.text.replace("<image>", "").strip()
    return Example(source=source, question=question, regions=request.mask_prompts, caption=_caption(sample))


def _caption(sample: Sample) -> str:
    label = {
        "referring": sample.text,
        "region_caption": "describe a region",
        "grounded_caption": "describe the picture",
    }[sample.task]
    return f"▶ {label}" if len(sample.frames) > 1 else label
