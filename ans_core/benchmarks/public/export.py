"""A benchmark's questions -> one plain file and the pictures, for a model that ANS does not run.

FOLDER/questions.jsonl: {"id", "pictures": [files], "text" (which holds `<image>` for each of several pictures),
"regions": [RLE], and the facts that the scorer needs}. With the model's reply added to each record ("prediction",
or what the scorer calls it) the file is what `ans eval score` reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from ans_core.benchmarks.public.asked import Item
from ans_core.pictures import media, transforms
from ans_core.types import FilePart, ImageRef, VideoFrame
from ans_core.written import refuse_foreign

QUESTIONS = "questions.jsonl"
IMAGE = "<image>\n"
PNG = b"\x89PNG"


def write_questions(items: Iterable[Item], folder: Path) -> int:
    """Write the file and those pictures that are no files yet; return the number of questions. Items are read
    one at a time. Raises ValueError for a folder that holds other files and no earlier questions."""
    refuse_foreign(folder, QUESTIONS, {"id", "pictures", "text"})
    count = 0
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / QUESTIONS).open("w", encoding="utf-8") as lines:
        for item in items:
            request = item.request
            pictures = [str(_file(picture, folder / "pictures", item.name)) for picture in request.frames]
            record = {"id": item.name, "pictures": pictures, "text": request.text.removeprefix(IMAGE)}
            regions = {"regions": list(request.mask_prompts)} if request.mask_prompts else {}
            lines.write(json.dumps(record | regions | item.facts) + "\n")
            count += 1
    return count


def _file(picture: ImageRef, folder: Path, name: str) -> Path:
    """Encoded bytes and frames of videos become a file named by its content, so that a picture of several
    questions is written once."""
    if isinstance(picture, Path):
        if not picture.is_file():
            raise ValueError(f"question {name}: no picture {picture}")
        return picture.resolve()
    if isinstance(picture, VideoFrame):
        picture = media.png(transforms.open_image(picture))
    content = picture.read_bytes() if isinstance(picture, FilePart) else picture
    path = (
        folder.resolve()
        / f"{hashlib.sha256(content).hexdigest()[:16]}{'.png' if content.startswith(PNG) else '.jpg'}"
    )
    if not path.exists():
        folder.mkdir(exist_ok=True)
        path.write_bytes(content)
    return path
