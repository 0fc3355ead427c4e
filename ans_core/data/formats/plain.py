"""Our own plain `annotations.json` (a list of {image, masks, text}) -> referring and region_caption samples.

One object of `masks` is a polygon [x1, y1, x2, y2, ...], a list of polygons, or an RLE. `masks: []` says that nothing in the
image fits the text.
Optional: `task` ("referring", the default, or "region_caption") and `split`; without a split, one image in five is "val", by a
hash of its path.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks
from ans_core.types import Sample

TASKS = ("referring", "region_caption")
KEYS = {"image", "masks", "text", "task", "split"}


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    """`path` is the file, or the folder that holds annotations.json. Images' paths count from the file's folder."""
    file, records = _records(path)
    checks.known_split(split, [_split(r, f"{file}: record {n}") for n, r in enumerate(records)], path=file)
    seen: dict[tuple[str, str, str], int] = {}
    sizes: dict[Path, tuple[int, int]] = {}
    samples = []
    for number, record in enumerate(records):
        where = f"{file}: record {number}"
        if unknown := set(record) - KEYS:
            raise ValueError(f"{where}: unknown keys {sorted(unknown)}; known are {sorted(KEYS)}")
        task = record.get("task", TASKS[0])
        if task not in TASKS:
            raise ValueError(f"{where}: task {task!r} is not one of {list(TASKS)}")
        text = checks.text(checks.field(record, "text", where=where), where=where)
        if (first := seen.setdefault((record["image"], task, text), number)) != number:
            raise ValueError(f"{where}: same image and text as record {first}; put the masks of all objects meant into one record")
        if _split(record, where) != split:
            continue
        image = file.parent / record["image"]
        if image not in sizes:
            sizes[image] = checks.image_size(image, where=where)
        height, width = sizes[image]
        masks = checks.field(record, "masks", where=where)
        if not isinstance(masks, list) or (not masks and task == "region_caption"):
            raise ValueError(f"{where}: masks is {masks!r}; expected a list with one entry per object (for region_caption at least one)")
        samples.append(
            Sample(
                sample_id=str(number),
                dataset=name,
                image_id=record["image"],
                frames=(image,),
                height=height,
                width=width,
                task=task,
                text=text,
                masks=tuple((checks.mask(m, height=height, width=width, where=f"{where}, mask {i}"),) for i, m in enumerate(masks)),
            )
        )
    return samples


def splits(path: Path) -> list[str]:
    file, records = _records(path)
    return sorted({_split(r, f"{file}: record {n}") for n, r in enumerate(records)})


def split_by_image(image: str) -> str:
    """Four in five "train", the rest "val"; depends on the text alone, so that more data never moves an image."""
    return "val" if int(hashlib.sha256(image.encode()).hexdigest(), 16) % 5 == 0 else "train"


def _records(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    file = path / "annotations.json" if path.is_dir() else path
    records = checks.load_json(file)
    if not isinstance(records, list) or not records:
        raise ValueError(f"{file}: expected a list with at least one record {{image, masks, text}}, found {str(records)[:60]!r}")
    return file, records


def _split(record: Any, where: str) -> str:
    image = checks.field(record, "image", where=where)
    return str(record.get("split") or split_by_image(image))
