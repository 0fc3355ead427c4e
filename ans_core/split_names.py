"""Names of annotation files -> the data set and the split that they tell."""

from __future__ import annotations

import re
from pathlib import Path

SPLIT_OF = re.compile(r"(?i)(?P<name>.*?)[_.-]?(?P<split>train|validation|valid|val|test)(20\d\d)?")


def name_and_split(file: Path) -> tuple[str, str | None]:
    """Return a data set's name and its split, as a file's name tells them."""
    match = SPLIT_OF.fullmatch(file.stem)
    split = match["split"].lower() if match else None
    return match["name"] if match else file.stem, "val" if split in ("valid", "validation") else split


def splits_beside(file: Path) -> list[Path]:
    """Return the files beside this one that differ only in the split: `a_val.json` beside `a_train.json`. A
    name without a split is of "train"."""
    name, split = name_and_split(file)
    alike = (other for other in sorted(file.parent.glob("*.json")) if name_and_split(other)[0] == name)
    return [other for other in alike if (name_and_split(other)[1] or "train") != (split or "train")]
