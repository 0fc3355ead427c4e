"""A Hugging Face `datasets` folder of region captions (GAR, describe-anything: image, mask_rle, conversations) ->
region_caption samples.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, load_from_disk

from ans_core.data.formats import checks
from ans_core.types import ImageRef, Sample

COLUMNS = ("image", "mask_rle", "conversations")


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    """`path/<split>` as saved by save_to_disk; split "train" may also be `path` itself. Paths of images count from that folder."""
    checks.known_split(split, splits(path), path=path)
    folder = path / split if (path / split).is_dir() else path
    rows = load_from_disk(str(folder))
    if not isinstance(rows, Dataset) or not set(COLUMNS) <= set(rows.column_names):
        raise ValueError(f"{folder}: not a region caption set; it needs the columns {list(COLUMNS)}")
    if isinstance(rows.features["image"], Image):
        rows = rows.cast_column("image", Image(decode=False))
    sizes: dict[Path, tuple[int, int]] = {}
    samples = []
    for number, row in enumerate(rows):
        where = f"{folder}: row {number}"
        image = _image(row["image"], folder, where=where)
        if isinstance(image, bytes):
            size = checks.image_size(image, where=where)
        else:
            size = sizes[image] = sizes.get(image) or checks.image_size(image, where=where)
        height, width = size
        masks = row["mask_rle"] if isinstance(row["mask_rle"], list) else [row["mask_rle"]]
        if not masks:
            raise ValueError(f"{where}: mask_rle is empty; a region caption needs a region, leave the row out")
        samples.append(
            Sample(
                sample_id=str(number),
                dataset=name,
                image_id=image.stem if isinstance(image, Path) else f"row{number}",
                frames=(image,),
                height=height,
                width=width,
                task="region_caption",
                text=_caption(row["conversations"], where=where),
                masks=tuple((checks.mask(m, height=height, width=width, where=where),) for m in masks),
                meta={key: value for key, value in row.items() if key not in COLUMNS and isinstance(value, str)},
            )
        )
    return samples


def splits(path: Path) -> list[str]:
    if (path / "dataset_info.json").is_file():
        return ["train"]
    found = sorted(p.parent.name for p in path.glob("*/dataset_info.json"))
    if not found:
        raise ValueError(f"{path}: no Hugging Face dataset folder (dataset_info.json) here or one level below; write it with save_to_disk")
    return found


def _image(value: Any, folder: Path, *, where: str) -> ImageRef:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{where}: image is {type(value).__name__}, neither a path nor encoded bytes")
    return (folder / value).resolve()


def _caption(turns: list[dict[str, str]], *, where: str) -> str:
    """The first answer; marks of prompts (`<Prompt0>`) are taken out."""
    answers = [turn["value"] for turn in turns if turn.get("from") == "gpt"]
    if not answers:
        raise ValueError(f'{where}: the conversation has no turn from "gpt"; a caption is needed')
    return checks.text(" ".join(re.sub(r"<Prompt\d+>", "", answers[0]).split()), where=where)
