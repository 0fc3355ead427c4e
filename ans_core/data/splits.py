"""The splits that a source takes of a data set, several of which are read as one."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ans_core.config.section import nearest
from ans_core.data.formats import FORMATS, SPLITS
from ans_core.data.formats.checks import NoSplit
from ans_core.types import Sample

EVALUATED = ("val", "test")
"""Splits of which a set that is trained on gives what is evaluated."""
HELD_OUT = re.compile(r"(val|dev|test)(?![a-z])|validation|testdev|test[A-Z]")
"""How names of splits begin that a pattern leaves alone, so that `*` does not train on what is evaluated:
`testA`, `val_u`, `test-dev`."""


def chosen(names: Sequence[str], present: Iterable[str], *, path: Path) -> list[str]:
    """Return the splits that have one of these names or match one of these patterns, in the set's order.
    Raises NoSplit for a name that fits none."""
    splits = list(dict.fromkeys(present))
    fitting: set[str] = set()
    for name in names:
        of_name = {name} & {*splits} or {
            split for split in fnmatch.filter(splits, name) if not HELD_OUT.match(split)
        }
        if not of_name:
            raise NoSplit(
                f"{path} has no split {name!r}{nearest(name, splits)}; it has {splits}{remedy(name, splits)}"
            )
        fitting |= of_name
    return [split for split in splits if split in fitting]


def remedy(name: str, splits: Sequence[str]) -> str:
    """Return how to train on a set that has no split `train`; nothing for another name."""
    parts = [split for split in splits if not HELD_OUT.match(split)]
    return f". To train on it, write `split: {json.dumps(parts)}` there" if name == "train" and parts else ""


def read(format: str, path: Path, *, name: str, split: str | Sequence[str]) -> Iterator[Sample]:
    """Yield the samples of one split, or of several (names, patterns) as one set. Of several, an id begins
    with its split: each part of a set counts from 0."""
    if isinstance(split, str):
        yield from FORMATS[format](path, name=name, split=split)
        return
    parts = chosen(split, SPLITS[format](path), path=path)
    for part in parts:
        for sample in FORMATS[format](path, name=name, split=part):
            yield replace(sample, sample_id=f"{part}/{sample.sample_id}") if len(parts) > 1 else sample
