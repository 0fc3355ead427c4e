"""Upstream Sa2VA's fine-tuning file (`annotations.json`: image, a list of masks `mask`, a list of texts
`text`) -> records of ours.

It has our file's name and is told apart by its keys. Pictures are in `images/` beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ans_core.data.formats import checks


class Picture(checks.Record):
    image: str
    mask: list[Any]
    """One object per text: a list of polygons, or one polygon. (An RLE, which upstream does not read, will
    do.)"""
    text: list[str]


def is_upstreams(value: object) -> bool:
    return isinstance(value, dict) and "mask" in value and isinstance(value.get("text"), list)


def records(value: object, *, folder: Path, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return one (place, record of ours) per text. A text that comes twice in a picture means both objects;
    upstream learns it twice, with different answers."""
    picture = checks.record(Picture, value, where)
    if len(picture.mask) != len(picture.text) or not picture.text:
        raise checks.DataError(
            f"{where}: mask has {len(picture.mask)} entries and text {len(picture.text)}; every mask needs "
            "its text"
        )
    inside = f"images/{picture.image}"
    image = inside if (folder / "images").is_dir() else picture.image
    meant: dict[str, tuple[str, str, list[Any]]] = {}
    for number, (mask, text) in enumerate(zip(picture.mask, picture.text, strict=True)):
        meant.setdefault(checks.text_key(text), (f"{where}, text {number}", text, []))[2].append(mask)
    return [(place, {"image": image, "text": text, "masks": masks}) for place, text, masks in meant.values()]
