"""An answer's masks -> the files that the page offers: PNG (zipped) and RLE."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from ans_core.demo.chat import Answer
from ans_core.demo.sources import Source
from ans_core.pictures import media, rle


def write_all(source: Source, question: str, answer: Answer, folder: Path) -> dict[str, Path]:
    """Write every form, whether masks are switched on or off; return the files by form."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"PNG": folder / "masks.zip", "RLE": folder / "answer.json"}
    with zipfile.ZipFile(files["PNG"], "w") as packed:
        for name, content in _pngs(answer):
            packed.writestr(name, content)
    record: dict[str, Any] = {
        "source": source.name,
        "asked": question,
        "text": answer.text,
        "masks": answer.masks,
    }
    files["RLE"].write_text(json.dumps(record), encoding="utf-8")
    return files


def _pngs(answer: Answer) -> Iterator[tuple[str, bytes]]:
    """Name the files as `ans predict` does."""
    for number, masklet in enumerate(answer.masks, start=1):
        for frame, mask in enumerate(masklet):
            content = media.png_as_is(Image.fromarray(rle.decode(mask)))
            yield f"object{number}_frame{frame:05d}.png", content
