"""Data sets of the settings -> the splits that stages read."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from ans_core.config import DataSource
from ans_core.data import DatasetEntry, read_samples, splits
from ans_core.data.formats import NO_VAL, SPLITS


def source_entries(
    sources: tuple[DataSource, ...], *, key: str = "prepare.sources", taken: Iterable[str] = ()
) -> list[DatasetEntry]:
    """Return the requested split and, if that is "train", also the set's own "val" and "test" for evaluation.
    key: the setting that they stand in. taken: names of other data sets. Raises ValueError for a split that
    the set on disk does not have."""
    entries = []
    names = set(taken)
    for source in sources:
        if source.name in names:
            raise ValueError(
                f"{key}: the name {source.name!r} is taken; give each data set a name of its own"
            )
        names.add(source.name)
        path = Path(source.path)
        if source.format not in SPLITS or not path.exists():
            # raises with the reason
            read_samples(format=source.format, path=path, name=source.name, split=source.split)
        present = SPLITS[source.format](path)
        parts = splits.chosen(source.parts or (source.role,), present, path=path)
        trained = source.role == "train"
        if source.hold_out and (not trained or "val" in present):
            has = (
                "it has a split 'val' of its own"
                if "val" in present
                else f"split {source.split!r} is asked for"
            )
            raise ValueError(
                f"{key}: {source.name!r} has hold_out {source.hold_out:g}, and {has}; set hold_out to 0"
            )
        if trained and "val" not in present and not source.hold_out:
            logging.warning("data set %r (%s): %s", source.name, path, NO_VAL)
        held_out = [
            split for split in splits.EVALUATED if trained and split in present and split not in parts
        ]
        held_out += ["val"] if source.hold_out else []
        entries += [
            DatasetEntry(
                name=source.name,
                format=source.format,
                path=source.path,
                split=split,
                kind="extra",
                repeats=source.repeats,
                parts=source.parts if split == source.role or (split == "val" and source.hold_out) else (),
                hold_out=source.hold_out if split in ("train", "val") else 0.0,
            )
            for split in (source.role, *held_out)
        ]
    return entries


def agent_entries(sources: tuple[DataSource, ...], *, alone: bool) -> list[DatasetEntry]:
    """Return the splits of `agent.sources`. alone: no drawn questions stand beside them, so there must be
    pictures to learn from and held-out ones; else it raises ValueError."""
    entries = source_entries(sources, key="agent.sources")
    if alone and (lacking := sorted({"train", "val"} - {entry.split for entry in entries})):
        raise ValueError(
            f"agent.families is empty, and agent.sources have no split {', '.join(lacking)}: set a source's "
            "hold_out (val), or name families"
        )
    return entries
