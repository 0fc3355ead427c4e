"""Our own plain `annotations.json` (a list of records) or `annotations.jsonl` (one per line) -> referring,
region_caption, phrase and conversation samples.

{image, text, masks}: each object in `masks` is a polygon [x1, y1, x2, y2, ...], a list of polygons, or an
RLE. `masks: []` says that nothing in the image fits the text. `task` is "referring" (the default) or
"region_caption". {image, text, task: "phrase"}: words for one thing of the picture whose mask is not known.
{image, question, answer, regions}: regions (optional) are masks that the question calls region1, region2, ...
`image` may be a list: the question is about several pictures, and may hold `<image>` where it means each.
Optional in all: `split`; without it, one image in five is "val", by a hash of its path, and a phrase is
"train". Records of upstream's file of the same name (finetune.py) are read beside these.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from ans_core import prompts
from ans_core.config.section import nearest
from ans_core.data.formats import checks, finetune
from ans_core.data.formats.files import file_of
from ans_core.data.formats.media import Media, picture_of, together
from ans_core.pictures import rle
from ans_core.storage import is_url
from ans_core.types import Masklet, Sample

FILES = ("annotations.json", "annotations.jsonl")
MEANT = {"validation": "val", "valid": "val", "dev": "val", "training": "train", "testing": "test"}
TASKS = ("referring", "region_caption", "phrase", "conversation")
REGION = re.compile(r"\bregion(\d+)\b")


def _split_name(value: object) -> object:
    if isinstance(value, str) and value in MEANT:
        raise ValueError(f"splits are train, val and test; write {MEANT[value]!r}")
    return value


def _one_spelling(value: object) -> object:
    """Write `./photos//a.jpg` as `photos/a.jpg`: its hash decides the split. (Through a link `..` may lead
    elsewhere, so it stays.)"""
    if isinstance(value, list):
        return [_one_spelling(one) for one in value]
    plain = isinstance(value, str) and value and ".." not in value and not is_url(value)
    return posixpath.normpath(str(value)) if plain else value


class Annotation(checks.Record):
    model_config = ConfigDict(extra="forbid")

    image: Annotated[str | checks.Filled[str], BeforeValidator(_one_spelling)]
    split: Annotated[Literal["train", "val", "test"] | None, BeforeValidator(_split_name)] = None

    @property
    def names(self) -> list[str]:
        return [self.image] if isinstance(self.image, str) else self.image

    @property
    def part(self) -> str:
        return self.split or split_by_image(self.names[0])


class Expression(Annotation):
    text: str
    masks: list[Any]
    task: Literal["referring", "region_caption"] = "referring"


class Phrase(Annotation):
    text: str
    task: Literal["phrase"]

    @property
    def part(self) -> str:
        return self.split or "train"  # nothing is measured on them


class Conversation(Annotation):
    question: str
    answer: str
    regions: list[Any] = Field(default=[])
    task: Literal["conversation"] = "conversation"


Record = Expression | Phrase | Conversation


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read `path`, the file or its folder. Image paths are relative to the file's folder."""
    file = _file(path)
    faults, parts = checks.Faults(file), set[str]()
    keys = checks.Keys()
    others = 0
    latest = list[str]()  # a picture's records mostly follow each other
    for number, (where, sample_id, record) in enumerate(_records(file, faults)):
        with faults:
            parts.add(record.part)
            _check_pictures(record, where)
            texts = _texts(record, where)
            if isinstance(record, Expression) and record.task == "referring":
                keys.add(number, (record.image, *map(checks.text_key, texts)))
            if record.part != split:
                others += 1
                continue
            if record.names != latest:
                files = [file_of(file.parent, name, where=where) for name in record.names]
                about = together([picture_of(one, where) for one in files])
                latest = record.names
            masks = _masks(record, about, where, faults=faults)
            if record.task != "referring":
                outlines = [m[0]["counts"] for m in masks]  # type: ignore[index]  # regions of a picture have masks
                keys.add(number, (record.image, record.task, *map(checks.text_key, texts), *outlines))
            yield about.sample(
                sample_id=sample_id,
                image_id="+".join(record.names),
                task=record.task,
                text=texts[-1],
                masks=masks,
                question=texts[0] if isinstance(record, Conversation) else None,
            )
    checks.check_split(split, parts or {split}, path=file)
    faults.usable -= others
    _refuse_twins(file, keys.twins(), faults, split=split)
    faults.tell(f" of the split {split!r}")


def splits(path: Path) -> list[str]:
    file = _file(path)
    faults = checks.Faults(file)
    parts = {record.part for _, _, record in _records(file, faults)}
    faults.tell()
    return sorted(parts)


def split_by_image(image: str) -> str:
    """Put four images in five into "train", the rest into "val"; depends on the text alone, so that more data
    never moves an image."""
    return "val" if int(hashlib.sha256(image.encode()).hexdigest(), 16) % 5 == 0 else "train"


def _file(path: Path) -> Path:
    """Return the file of a folder, or the file itself. Raises DataError for a folder with both."""
    if not path.is_dir():
        return path
    files = [path / name for name in FILES if (path / name).is_file()]
    if len(files) > 1:
        raise checks.DataError(
            f"{path} has {FILES[0]} and {FILES[1]}, and one would not be read: put all records into one of "
            "them"
        )
    return files[0] if files else path / FILES[0]


def _records(file: Path, faults: checks.Faults) -> Iterator[tuple[str, str, Record]]:
    """Yield (place, id, record) of the well-formed records; `faults` gets those of the others."""
    lines = file.suffix == ".jsonl"
    for number, value in checks.load_json_lines(file) if lines else enumerate(_list(file)):
        where = f"{file}: {'line' if lines else 'record'} {number}"
        with faults:
            if finetune.is_upstreams(value):
                texts = finetune.records(value, folder=file.parent, where=where)
                yield from [
                    (at, f"{number}_{n}", checks.record(Expression, entry, at))
                    for n, (at, entry) in enumerate(texts)
                ]
                continue
            asks = isinstance(value, dict) and not {"question", "answer"}.isdisjoint(value)
            task = value.get("task") if isinstance(value, dict) else None
            if isinstance(task, str) and task not in TASKS:
                raise checks.DataError(
                    f"{where}: task {task!r} is not one of {list(TASKS)}{nearest(task, TASKS)}"
                )
            phrase = task == "phrase"
            form: type[Record] = Conversation if asks else Phrase if phrase else Expression
            yield where, str(number), checks.record(form, value, where)


def _list(file: Path) -> list[Any]:
    content = checks.load_json(file)
    if isinstance(content, dict) and {"images", "annotations"} <= set(content):
        raise checks.DataError(
            f"{file} is a COCO file (images, annotations). To learn its categories as texts, give the "
            "file's own path with the format coco. For other texts, write one record for each, with the "
            "segmentations of the objects that it means as masks"
        )
    if not isinstance(content, list) or not content:
        raise checks.DataError(
            f"{file}: expected a list with at least one record {{image, masks, text}}, found "
            f"{rle.short(content)}"
        )
    return content


def _check_pictures(record: Record, where: str) -> None:
    """Raise DataError for several pictures where there may be one."""
    if len(record.names) > 1 and (not isinstance(record, Conversation) or record.regions):
        raise checks.DataError(
            f"{where}: {len(record.names)} pictures; only a question without regions may be about several"
        )


def _texts(record: Record, where: str) -> tuple[str, ...]:
    """Return the text, or question and answer."""
    if not isinstance(record, Conversation):
        return (checks.text(record.text, where),)
    question = record.question
    if len(record.names) > 1:
        try:
            (question,) = prompts.name_pictures([question], len(record.names))
        except ValueError as error:
            raise checks.DataError(f"{where}: {error}; write one for each, or none") from None
    question = checks.text(question, f"{where}, question")
    for number in REGION.findall(question):
        if not 1 <= int(number) <= len(record.regions):
            raise checks.DataError(
                f"{where}: the question asks about region{number}, and regions has {len(record.regions)}; "
                "they count from 1"
            )
    return question, checks.text(record.answer, f"{where}, answer")


def _refuse_twins(file: Path, twins: Mapping[int, int], faults: checks.Faults, *, split: str) -> None:
    """Add a fault for every record (by its number) that says the same as an earlier one."""
    if not twins:
        return
    numbered = enumerate(_records(file, checks.Faults(file)))
    records = {number: found for number, found in numbered if number in {*twins, *twins.values()}}
    for number, first in twins.items():
        where, _, record = records[number]
        faults.usable -= record.part == split
        remedy = (
            "leave one of them out"
            if isinstance(record, Phrase)
            else "put the masks of all objects meant into one record"
        )
        place = records[first][0].rpartition(": ")[2]
        faults.add(checks.DataError(f"{where}: same image and text as {place}; {remedy}"))


def _masks(record: Record, about: Media, where: str, *, faults: checks.Faults) -> tuple[Masklet, ...]:
    if isinstance(record, Phrase):
        return ()
    noun, segmentations = (
        ("mask", record.masks) if isinstance(record, Expression) else ("region", record.regions)
    )
    if not segmentations and record.task == "region_caption":
        raise checks.DataError(f"{where}: masks is empty; a region caption needs at least one")
    masks: list[Masklet] = []
    reason = ""
    for number, segmentation in enumerate(segmentations):
        try:
            mask = about.usable_mask(segmentation, f"{where}, {noun} {number}", faults=faults)
        except checks.Unusable as unusable:
            reason = str(unusable)
        else:
            masks.append((mask,))
    # a question names its regions by number, so none may go
    if reason and (isinstance(record, Conversation) or not masks):
        raise checks.Unusable(reason)
    faults.notes["masks without a pixel are left out of records with others"] += len(segmentations) - len(
        masks
    )
    return tuple(masks)
