"""Episodes -> a folder that a page is made of: episodes.json and the pictures that were shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def write_album(folder: Path, episodes: Sequence[tuple[Outcome, PlayedEpisode]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = [_record(folder, number, outcome, played) for number, (outcome, played) in enumerate(episodes)]
    (folder / FILE).write_text(json.dumps(records, indent=1), encoding="utf-8")


def chosen(outcomes: Sequence[Outcome], *, each: int) -> list[int]:
    """Return places of `each` outcomes of every family: right and wrong ones in turns, as far as there are both."""
    found = []
    for family in dict.fromkeys(o.question.family for o in outcomes):
        places = [i for i, o in enumerate(outcomes) if o.question.family == family]
        right, wrong = ([i for i in places if outcomes[i].right is verdict] for verdict in (True, False))
        count = min(len(right), max(each - len(wrong), (each + 1) // 2))
        found += [*right[:count], *wrong[: each - count]]
    return found


def _record(folder: Path, number: int, outcome: Outcome, played: PlayedEpisode) -> dict[str, Any]:
    name = f"{number:03d}"
    workspace = played.episode.workspace
    return {
        "question_id": outcome.question.question_id,
        "family": outcome.question.family,
        "question": outcome.question.text,
        "truth": outcome.question.answer,
        "answer": outcome.answer,
        "right": outcome.right,
        "evidence": outcome.evidence,
        "ended": played.ended,
        "picture": _saved(_first_frame(workspace), folder / f"{name}.png"),
        "turns": [_turn(folder, f"{name}-{place}", turn) for place, turn in enumerate(played.turns)],
    }


def _first_frame(workspace: Workspace) -> Image.Image:
    """With the masks that were made on it."""
    masks = [name for name, handle in workspace.handles if isinstance(handle, MaskHandle) and handle.frame == 0]
    return overlay.draw(opened(workspace.frames[0]), [workspace.rle(name) for name in masks])


def _turn(folder: Path, name: str, turn: PlayedTurn) -> dict[str, Any]:
    record: dict[str, Any] = {"said": turn.text, "given": turn.given}
    if turn.shown is not None:
        crops = [crop.picture(least=WIDTH) for crop in turn.shown.crops]
        record["shown"] = turn.shown.text.replace("<image>\n", "")
        record["error"] = turn.shown.observation.error
        record["pictures"] = [_saved(crop, folder / f"{name}-{place}.png") for place, crop in enumerate(crops)]
    return record


def _saved(picture: Image.Image, path: Path) -> str:
    scale = WIDTH / max(picture.size)
    if scale < 1:
        picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), Image.Resampling.LANCZOS)
    picture.save(path)
    return path.name
