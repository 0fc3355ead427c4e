"""Data sets in, the samples that predictions are about out: found by data set, id and text, not by place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from ans_core import data
from ans_core.config import DataSource
from ans_core.data import DatasetEntry
from ans_core.types import Sample

Wanted = tuple[str, str, str]
"""Data set, sample id, and what was asked: the sample's text."""


def samples_of(
    wanted: AbstractSet[Wanted], *, prepared: Path | None, split: str, sources: Sequence[DataSource]
) -> tuple[dict[Wanted, Sample], dict[str, str]]:
    """Return the samples that are there, and by data set why others are not. The rest is as the stage
    `evaluate` has it."""
    by_key: dict[Wanted, Sample] = {}
    absent: dict[str, str] = {}
    named = {dataset for dataset, _, _ in wanted}
    for entry in _entries(prepared, split, sources):
        if entry.name not in named:
            continue
        try:
            samples = data.samples_of(entry) if prepared is None else data.read_entry(prepared, entry)
            keyed = (((entry.name, sample.sample_id, sample.text), sample) for sample in samples)
            by_key |= {key: sample for key, sample in keyed if key in wanted}
        except (ValueError, OSError) as error:  # moved or changed since it was evaluated
            absent[entry.name] = str(error)
    for dataset, _, _ in sorted(wanted - by_key.keys()):
        absent.setdefault(dataset, "its samples are not there, or not those that were evaluated")
    return by_key, absent


def entry_of(source: DataSource) -> DatasetEntry:
    """Return a set of `evaluate.sources`, which is evaluated and in no prepared folder."""
    return DatasetEntry(
        name=source.name,
        format=source.format,
        path=source.path,
        split=source.role,
        kind="extra",
        parts=source.parts,
    )


def _entries(prepared: Path | None, split: str, sources: Sequence[DataSource]) -> Iterator[DatasetEntry]:
    """Yield the data sets that `evaluate` reads; of a user's set without the split, `val`."""
    if prepared is not None:
        of_split = data.read_entries(prepared, split)
        there = {entry.name for entry in of_split}
        yield from of_split
        yield from (
            entry for entry in data.read_entries(prepared, "val", ["extra"]) if entry.name not in there
        )
    yield from map(entry_of, sources)
