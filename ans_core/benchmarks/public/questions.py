"""What question benchmarks share when a model is asked: tables (TSV) with the pictures inside, and the words
around a question."""

from __future__ import annotations

import base64
import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ans_core import prompts
from ans_core.benchmarks.public import files

LETTER = "Answer with the option's letter from the given choices directly."
SHORT = "Answer the question using a single word or phrase."
"""InternVL's words, in training and evaluation."""
REFERENCE = 64
"""An `image` up to this length is the index of the row that holds the picture."""


def ask(question: str, options: Mapping[str, str], *, hint: str = "", pictures: int = 1) -> str:
    """Without options a word or phrase is asked for."""
    lines = [hint] if hint else []
    lines += [
        question,
        *(f"{letter}. {text}" for letter, text in options.items()),
        LETTER if options else SHORT,
    ]
    return prompts.picture_marks(pictures) + "\n".join(lines)


def table(folder: Path, *names: str) -> Iterator[tuple[files.Record, bytes]]:
    """Yield (row, its picture) of the table; one picture is in memory at a time, and those that several rows
    name."""
    path = files.named(folder, *names)
    named = {row["image"] for row in _rows(path) if len(row["image"]) <= REFERENCE}
    shared: dict[str, str] = {}
    for number, row in enumerate(_rows(path), start=2):
        image, index = row.pop("image"), row["index"]
        coded = shared.get(image, image)
        if index in named:
            shared[index] = coded
        try:
            picture = base64.b64decode(coded, validate=True)
        except ValueError:
            picture = b""
        if len(coded) <= REFERENCE or not picture:
            raise ValueError(
                f"{path}, line {number}: `image` is neither a picture in base64 nor the index of an earlier "
                "row"
            )
        yield files.Record(row, f"{path}, question {index}"), picture


def _rows(path: Path) -> Iterator[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        if absent := {"index", "question", "image"} - set(rows.fieldnames or ()):
            raise ValueError(
                f"{path}: columns {', '.join(sorted(absent))} are missing; it has {rows.fieldnames}"
            )
        yield from rows
