"""Episodes -> entries -> a folder that a page is made of: episodes.json and the pictures that were shown."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ans_core import overlay
from ans_core.agent.evaluation import Outcome
from ans_core.agent.play import PlayedEpisode, PlayedTurn
from ans_core.agent.workspace import MaskHandle, Workspace, opened

FILE = "episodes.json"
WIDTH = 240
"""Pixels on the longer side of a picture on the page."""


@dataclass(frozen=True, kw_only=True)
class AlbumEntry:
    """An episode as the page shows it. (Unlike a PlayedEpisode, which holds its model, it can be sent to another process.)"""

    record: dict[str, Any]
    pictures: Mapping[str, bytes]
    """File -> PNG."""


def write_album(folder: Path, entries: Sequence[AlbumEntry]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        for name, encoded in entry.pictures.items():
            (folder / name).write_bytes(encoded)
    (folder / FILE).write_text(json.dumps([entry.record for entry in entries], indent=1), encoding="utf-8")


def chosen(outcomes: Sequence[Outcome], *, each: int) -> list[int]:
    """Return places of `each` outcomes of every family: right and wrong ones in turns, as far as there are both."""
    found = []
    for family in dict.fromkeys(o.question.family for o in outcomes):
        places = [i for i, o in enumerate(outcomes) if o.question.family == family]
        right, wrong = ([i for i in places if outcomes[i].right is verdict] for verdict in (True, False))
        count = min(len(right), max(each - len(wrong), (each + 1) // 2))
        found += [*right[:count], *wrong[: each - count]]
    return found


def album_entry(number: int, outcome: Outcome, played: PlayedEpisode) -> AlbumEntry:
    """Return the entry of an episode; its pictures are named by `number`, its place in the album."""
    name = f"{number:03d}"
    workspace = played.episode.workspace
    pictures = {f"{name}.png": _first_frame(workspace)}
    turns = []
    for place, turn in enumerate(played.turns):
        crops = [] if turn.shown is None else [crop.picture(least=WIDTH) for crop in turn.shown.crops]
        shown = {f"{name}-{place}-{i}.png": crop for i, crop in enumerate(crops)}
        pictures |= shown
        turns.append(_turn(turn, list(shown)))
    record = {
        "question_id": outcome.question.question_id,
        "family": outcome.question.family,
        "question": outcome.question.text,
        "truth": outcome.question.answer,
        "answer": outcome.answer,
        "right": outcome.right,
        "evidence": outcome.evidence,
        "ended": played.ended,
        "picture": f"{name}.png",
        "turns": turns,
    }
    return AlbumEntry(record=record, pictures={file: _png(picture) for file, picture in pictures.items()})


def _first_frame(workspace: Workspace) -> Image.Image:
    """With the masks that were made on it."""
    masks = [name for name, handle in workspace.handles if isinstance(handle, MaskHandle) and handle.frame == 0]
    return overlay.draw(opened(workspace.frames[0]), [workspace.rle(name) for name in masks])


def _turn(turn: PlayedTurn, files: Sequence[str]) -> dict[str, Any]:
    record: dict[str, Any] = {"said": turn.text, "given": turn.given}
    if turn.shown is not None:
        record["shown"] = turn.shown.text.replace("<image>\n", "")
        record["error"] = turn.shown.observation.error
        record["pictures"] = list(files)
    return record


def _png(picture: Image.Image) -> bytes:
    scale = WIDTH / max(picture.size)
    if scale < 1:
        picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue()
