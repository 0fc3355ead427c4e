"""A Hugging Face `datasets` folder about regions (GAR, describe-anything: image, mask_rle, conversations) ->
region_caption samples, and conversations where the words name several regions.

GAR's Seed and Fine-Grained sets have captions, its Relation set has questions about <Prompt0>, <Prompt1>, ...
.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pyarrow
from pydantic import BeforeValidator, Field

from ans_core.data.formats import checks
from ans_core.data.formats.arrow_parts import embedded
from ans_core.data.formats.media import Media, picture_of
from ans_core.data.formats.turns import Turn, exchanges
from ans_core.pictures import rle
from ans_core.types import RLE, FilePart, Masklet, Sample

LAYOUT = "Hugging Face dataset folder (dataset_info.json) here or one level below; write it with save_to_disk"


class Row(checks.Record):
    image: Any
    mask_rle: Annotated[
        list[Any],
        Field(min_length=1),
        BeforeValidator(lambda value: [value] if isinstance(value, dict) else value),
    ]
    conversations: list[Turn]


COLUMNS = tuple(Row.model_fields)
PROMPT = re.compile(r"<Prompt(\d{1,4})>")
ENCODED = "data:"
"""Start of a picture in base64: `data:base64,...` (GAR) or `data:image/png;base64,...`."""
ARROW_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    pyarrow.ArrowException,
)
"""Errors that `datasets` and pyarrow raise for damaged files."""


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read `path/<split>` as saved by save_to_disk; split "train" may also be `path` itself. Image paths are
    relative to that folder."""
    folder = path / split if (path / split).is_dir() else path
    faults = checks.Faults(folder)
    for number, (value, part) in enumerate(_rows(folder)):
        with faults:
            where = f"{folder}: row {number}"
            row = checks.record(Row, value, where)
            image = _picture(folder, row.image, part, where=where)
            masks = [image.mask(m, where) for m in row.mask_rle]
            file = image.frames[0]
            for place, fields in enumerate(_sample_fields(row.conversations, masks, where)):
                yield image.sample(
                    sample_id=str(number) if place == 0 else f"{number}_{place}",
                    image_id=file.stem if isinstance(file, Path) else f"row{number}",
                    meta={
                        key: extra for key, extra in value.items() if key not in COLUMNS and _is_meta(extra)
                    },
                    **fields,
                )
    faults.tell()


def _is_meta(value: Any) -> bool:
    """Tell whether a further column's value goes into `meta`: a text, or a list of texts (describe-anything's
    categories)."""
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
    )


def splits(path: Path) -> list[str]:
    if (path / "dataset_info.json").is_file():
        return ["train"]
    return sorted(file.parent.name for file in path.glob("*/dataset_info.json"))


def _rows(folder: Path) -> Iterator[tuple[dict[str, Any], FilePart | None]]:
    """Yield (row, place of its embedded picture in the file)."""
    from datasets import Dataset, Image, load_from_disk  # loads pandas: a second of every start

    try:
        rows = load_from_disk(str(folder))
        if isinstance(rows, Dataset):
            rows.data.table.validate(full=True)  # offsets of damaged files would be followed blindly
    except ARROW_ERRORS as error:
        raise checks.DataError(
            f"{folder}: `datasets` can't load it ({error}); write it again with save_to_disk"
        ) from None
    if not isinstance(rows, Dataset) or not len(rows) or not set(COLUMNS) <= set(rows.column_names):
        raise checks.DataError(
            f"{folder}: not a region caption set; it needs at least one row, and the columns {list(COLUMNS)}"
        )
    if isinstance(rows.features["image"], Image):
        rows = rows.cast_column("image", Image(decode=False))
    return zip(rows, embedded(folder, "image"), strict=True)


def _picture(folder: Path, value: Any, part: FilePart | None, *, where: str) -> Media:
    """Read a row's picture: a path from the folder, or encoded bytes, which `part` of the Arrow file holds."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value.startswith(ENCODED):
        value = _from_base64(value.removeprefix(ENCODED).partition(",")[2], where=where)
    if isinstance(value, bytes):
        picture = picture_of(value, where)
        return replace(picture, frames=(part,)) if part else picture
    if not isinstance(value, str) or not value or "\0" in value:
        raise checks.DataError(f"{where}: image is {rle.short(value)}, neither a path nor encoded bytes")
    parent, _, leaf = value.rpartition("/")
    return picture_of(_resolved(folder / (parent or ("/" if value.startswith("/") else "."))) / leaf, where)


_resolved = lru_cache(maxsize=4096)(Path.resolve)


def _from_base64(text: str, *, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise checks.DataError(f"{where}: the image is not base64 ({error}); write the row again") from None


def _sample_fields(turns: list[Turn], masks: list[RLE], where: str) -> list[dict[str, Any]]:
    """Return task, masks and texts of a row's samples: a conversation, if it names prompts and has several
    masks or questions; one caption for each mask, if there is an answer for each; otherwise the first answer
    as the caption of all masks together."""
    answers = [turn.value for turn in turns if turn.speaker == "gpt"]
    if not answers:
        raise checks.DataError(f'{where}: the conversation has no turn from "gpt"; a caption is needed')
    several = len(masks) > 1 or len(answers) > 1
    if several and any(PROMPT.search(turn.value) for turn in turns):
        return [_conversation(turns, masks, where)]
    if several and len(answers) == len(masks):
        return [_caption(answer, ((mask,),), where) for answer, mask in zip(answers, masks, strict=True)]
    return [_caption(answers[0], tuple((mask,) for mask in masks), where)]


def _caption(answer: str, masks: tuple[Masklet, ...], where: str) -> dict[str, Any]:
    """Return a caption, without prompt markers."""
    return {
        "task": "region_caption",
        "text": checks.text(" ".join(PROMPT.sub("", answer).split()), where),
        "masks": masks,
    }


def _conversation(turns: list[Turn], masks: list[RLE], where: str) -> dict[str, Any]:
    """Return a conversation about the masks that its words name: <Prompt3> is the fourth mask, and region1 if
    no earlier one is named."""
    try:
        pairs = exchanges(turns)
    except checks.Unusable as reason:
        raise checks.DataError(
            f"{where}: {reason} in the conversation; correct it or leave the row out"
        ) from None
    named = sorted({int(number) for pair in pairs for text in pair for number in PROMPT.findall(text)})
    if not named or named[-1] >= len(masks):
        raise checks.DataError(
            f"{where}: the conversation names the prompts {named[:9]}, and mask_rle has {len(masks)} masks, "
            "from 0 on"
        )
    regions = {number: f"region{place}" for place, number in enumerate(named, start=1)}
    worded = [
        tuple(PROMPT.sub(lambda match: regions[int(match[1])], text) for text in pair) for pair in pairs
    ]
    *past, (question, answer) = worded
    shown = tuple((masks[number],) for number in named)
    return {"task": "conversation", "question": question, "text": answer, "past": tuple(past), "masks": shown}
