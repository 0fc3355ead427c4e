"""A Hugging Face `datasets` folder of region captions (GAR, describe-anything: image, mask_rle, conversations) ->
region_caption samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow
from datasets import Dataset, Image, load_from_disk
from pydantic import BeforeValidator, Field

from ans_core import rle
from ans_core.data.formats import checks
from ans_core.data.formats.arrow_parts import embedded
from ans_core.types import FilePart, ImageRef, Sample


class Turn(checks.Record):
    speaker: str = Field(alias="from")
    value: str


class Row(checks.Record):
    image: Any
    mask_rle: Annotated[list[Any], Field(min_length=1), BeforeValidator(lambda value: [value] if isinstance(value, dict) else value)]
    conversations: list[Turn]


COLUMNS = tuple(Row.model_fields)
ARROW_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, pyarrow.ArrowException)
"""Errors that `datasets` and pyarrow raise for damaged files."""


def read(path: Path, *, name: str, split: str) -> list[Sample]:
    """Read `path/<split>` as saved by save_to_disk; split "train" may also be `path` itself. Image paths are relative to that folder."""
    checks.known_split(split, splits(path), path=path)
    folder = path / split if (path / split).is_dir() else path
    images = _Images(folder)
    faults = checks.Faults(folder)
    samples = []
    for number, value in enumerate(_rows(folder)):
        with faults:
            where = f"{folder}: row {number}"
            row = checks.record(Row, value, where=where)
            image, (height, width) = images.find(row.image, where=where)
            samples.append(
                Sample(
                    sample_id=str(number),
                    dataset=name,
                    image_id=image.stem if isinstance(image, Path) else f"row{number}",
                    frames=(image,),
                    height=height,
                    width=width,
                    task="region_caption",
                    text=_caption(row.conversations, where=where),
                    masks=tuple((checks.mask(m, height=height, width=width, where=where),) for m in row.mask_rle),
                    meta={key: extra for key, extra in value.items() if key not in COLUMNS and isinstance(extra, str)},
                )
            )
    faults.tell()
    return samples


def splits(path: Path) -> list[str]:
    if (path / "dataset_info.json").is_file():
        return ["train"]
    found = sorted(p.parent.name for p in path.glob("*/dataset_info.json"))
    if not found:
        raise checks.DataError(
            f"{path}: no Hugging Face dataset folder (dataset_info.json) here or one level below; write it with save_to_disk"
        )
    return found


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        rows = load_from_disk(str(folder))
        if isinstance(rows, Dataset):
            rows.data.table.validate(full=True)  # offsets of damaged files would be followed blindly
    except ARROW_ERRORS as error:
        raise checks.DataError(f"{folder}: `datasets` can't load it ({error}); write it again with save_to_disk") from None
    if not isinstance(rows, Dataset) or not len(rows) or not set(COLUMNS) <= set(rows.column_names):
        raise checks.DataError(f"{folder}: not a region caption set; it needs at least one row, and the columns {list(COLUMNS)}")
    if isinstance(rows.features["image"], Image):
        rows = rows.cast_column("image", Image(decode=False))
    return (row if part is None else row | {"image": part} for row, part in zip(rows, embedded(folder, "image"), strict=True))


class _Images:
    """Pictures of a folder and their sizes, each opened once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[Path, tuple[int, int]] = {}
        self.parents: dict[str, Path] = {}

    def find(self, value: Any, *, where: str) -> tuple[ImageRef, tuple[int, int]]:
        if isinstance(value, dict):
            value = value.get("path")
        if isinstance(value, (bytes, FilePart)):
            return value, checks.image_size(value, where=where)
        if not isinstance(value, str) or not value or "\0" in value:
            raise checks.DataError(f"{where}: image is {rle.short(value)}, neither a path nor encoded bytes")
        parent, _, leaf = value.rpartition("/")
        if parent not in self.parents:
            self.parents[parent] = (self.folder / (parent or ("/" if value.startswith("/") else "."))).resolve()
        image = self.parents[parent] / leaf
        if image not in self.sizes:
            self.sizes[image] = checks.image_size(image, where=where)
        return image, self.sizes[image]


def _caption(turns: list[Turn], *, where: str) -> str:
    """Return the first answer, without prompt markers (`<Prompt0>`)."""
    answer = next((turn.value for turn in turns if turn.speaker == "gpt"), None)
    if answer is None:
        raise checks.DataError(f'{where}: the conversation has no turn from "gpt"; a caption is needed')
    return checks.text(" ".join(re.sub(r"<Prompt\d+>", "", answer).split()), where=where)
