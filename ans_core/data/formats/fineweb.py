"""FineWeb (`**/*.parquet`: text, id, url, language, ...) -> pages to be read: the first lines of a document,
typeset, and the same as text.

FineWeb is text alone. A picture of its words makes a question whose answer is known to the letter: what
stands on the page. A document whose first words go beyond printable ASCII is left out, as is one that has too
few words; of a file at most PAGES documents are taken, at equal steps, since every page is held as a PNG.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ans_core.data.formats import checks
from ans_core.data.formats.files import parquet_files, parquet_table
from ans_core.data.formats.media import Media
from ans_core.data.formats.turns import conversation
from ans_core.types import Sample

FILES = "**/*.parquet"
COLUMNS = ("text", "id")
PAGES = 10_000
LINES, LETTERS = 6, 40
"""Of a page: lines, and letters of a line at most."""
SIZE, LEADING, MARGIN = 20, 28, 16
"""Pixels: of the letters (from 20 px tesseract reads them without an error), from line to line, around the
text."""
SIDE = 2 * MARGIN + LETTERS * SIZE * 6 // 10, 2 * MARGIN + LINES * LEADING
"""Width and height of a page."""
ASKED = "Read the text in this image."


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read the only split, "train". `path` is a folder of the release or one file of it."""
    faults = checks.Faults(path)
    for file in parquet_files(path, FILES, release="FineWeb"):
        for number, row in _rows(file):
            with faults:
                sample = _sample(row, f"{file}: row {number}")
                faults.once(f"document {sample.sample_id}", where=f"{file}: row {number}")
                yield sample
    faults.tell()


def splits(path: Path) -> list[str]:
    parquet_files(path, FILES, release="FineWeb")
    return ["train"]


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of at most PAGES rows at equal steps."""
    with parquet_table(file) as table:
        if absent := set(COLUMNS) - set(table.schema_arrow.names):
            raise checks.DataError(
                f"{file}: columns {', '.join(sorted(absent))} are missing; it is no file of FineWeb"
            )
        step, number = max(1, -(-table.metadata.num_rows // PAGES)), 0
        for batch in table.iter_batches(batch_size=1024, columns=list(COLUMNS)):
            for row in batch.to_pylist():
                if number % step == 0:
                    yield number, row
                number += 1


def _sample(row: dict[str, Any], where: str) -> Sample:
    if not isinstance(row["text"], str) or not isinstance(row["id"], str):
        raise checks.DataError(f"{where}: text and id are to be texts")
    lines = first_lines(row["text"])
    text = checks.text("\n".join(lines), where)
    width, height = SIDE
    media = Media(frames=(page(lines),), height=height, width=width)
    return conversation([(ASKED, text)], media, sample_id=row["id"], image_id=row["id"])


def first_lines(text: str) -> list[str]:
    """Return the lines of a page. Raises Unusable for a text that can't be set, or that does not fill half of
    it."""
    start = " ".join(text[: 4 * LINES * LETTERS].split())
    lines = textwrap.wrap(start, LETTERS, break_long_words=True)[:LINES]
    if not all(line.isascii() and line.isprintable() for line in lines):
        raise checks.Unusable("letters beyond ASCII")
    if len(lines) < LINES // 2:
        raise checks.Unusable("too few words")
    return lines


def page(lines: list[str]) -> bytes:
    """Return a PNG: black on white, one font, decided by the text alone."""
    picture = Image.new("L", SIDE, 255)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(SIZE)
    for number, line in enumerate(lines):
        draw.text((MARGIN, MARGIN + number * LEADING), line, fill=0, font=font)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
