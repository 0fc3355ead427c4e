"""Episodes -> entries -> a folder that a page is made of: episodes.json and the pictures that were shown."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ans_core.agent.episode import Observation
from ans_core.agent.evaluation import Outcome
from ans_core.agent.play import PlayedEpisode, PlayedTurn
from ans_core.agent.rewards.total import episode_parts
from ans_core.agent.workspace import Workspace, opened
from ans_core.pictures import overlay, rle
from ans_core.types import RLE

FILE = "episodes.json"
WIDTH = 240
"""Pixels on the longer side of a picture on the page."""
STILLS = 6
"""Frames that a track is shown in."""
STILL_WIDTH = 120
"""Pixels on the longer side of a track's frames."""
QUALITY = 90
"""Of WebP: 21 drawn pictures have 105 KB, as PNG 773 KB, for their backgrounds are noise."""


@dataclass(frozen=True, kw_only=True)
class AlbumEntry:
    """An episode as the page shows it. (Unlike a PlayedEpisode, which holds its model, it can be sent to
    another process.)"""

    record: dict[str, Any]
    pictures: Mapping[str, bytes]
    """File -> WebP."""


def write_album(folder: Path, entries: Sequence[AlbumEntry]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        for name, encoded in entry.pictures.items():
            (folder / name).write_bytes(encoded)
    (folder / FILE).write_text(json.dumps([entry.record for entry in entries], indent=1), encoding="utf-8")


def chosen(outcomes: Sequence[Outcome], *, each: int) -> list[int]:
    """Return places of `each` outcomes of every family: right and wrong ones in turns, as far as there are
    both."""
    selected = []
    for family in dict.fromkeys(o.question.family for o in outcomes):
        places = [i for i, o in enumerate(outcomes) if o.question.family == family]
        right, wrong = ([i for i in places if outcomes[i].right is verdict] for verdict in (True, False))
        count = min(len(right), max(each - len(wrong), (each + 1) // 2))
        selected += [*right[:count], *wrong[: each - count]]
    return selected


def album_entry(number: int, outcome: Outcome, played: PlayedEpisode) -> AlbumEntry:
    """Return the entry of an episode; its pictures are named by `number`, its place in the album."""
    workspace = played.episode.workspace
    overviews = [f"{number:03d}.webp", *(f"{number:03d}_{name}.webp" for name in workspace.overviews[1:])]
    pictures = {file: opened(frame) for file, frame in zip(overviews, workspace.frames, strict=False)}
    turns = []
    for place, turn in enumerate(played.turns):
        record, shown = _turn(turn, workspace, f"{number:03d}-{place}")
        turns.append(record)
        pictures |= shown
    record = {
        "question_id": outcome.question.question_id,
        "family": outcome.question.family,
        "question": outcome.question.text,
        "truth": outcome.question.answer,
        "answer": outcome.answer,
        "right": outcome.right,
        "evidence": outcome.evidence,
        "ended": played.ended,
        "pictures": overviews,
        "turns": turns,
        **rewards(outcome, played),
    }
    return AlbumEntry(record=record, pictures={file: _webp(picture) for file, picture in pictures.items()})


def rewards(outcome: Outcome, played: PlayedEpisode) -> dict[str, Any]:
    """Return `rewards`, the parts that RFT would pay for this episode, before their weights; `faults`, the
    penalties' names; and `lesson`, whether RFT would learn from it.

    Only what is a function of the episode: not the bonus of curiosity. The coherence is not
    normalised."""
    parts, faults = episode_parts(outcome.question, played.episode, evidence=outcome.evidence)
    return {
        "rewards": {"task": float(outcome.right), **parts},
        "faults": [name for name, value in faults.items() if value],
        "lesson": played.is_lesson,
    }


def _turn(turn: PlayedTurn, workspace: Workspace, name: str) -> tuple[dict[str, Any], dict[str, Image.Image]]:
    """Return a turn's record, and its pictures by file; `name` is what their names begin with."""
    record: dict[str, Any] = {"said": turn.text, "given": turn.planned}
    if turn.shown is None:
        return record, {}
    crops = {f"{name}-{i}.webp": crop.picture(least=WIDTH) for i, crop in enumerate(turn.shown.crops)}
    stills = stills_of(turn.shown.observation, workspace)
    files = {label: f"{name}-mask-{i}.webp" for i, label in enumerate(stills)}
    record |= {
        "shown": turn.shown.text.replace("<image>\n", ""),
        "error": turn.shown.observation.error,
        "pictures": list(crops),
        "masks": [{"label": label, "picture": file} for label, file in files.items()],
    }
    return record, crops | {files[label]: still for label, still in stills.items()}


def stills_of(observation: Observation, workspace: Workspace) -> dict[str, Image.Image]:
    """Return pictures of what a call made, by their labels: a mask on its frame; of a track at most STILLS
    frames, evenly spread from the first to the last, in the colour of the mask that it was followed from.
    Empty if it made neither."""
    made, track = observation.values.get("mask"), observation.values.get("track")
    if track is not None:
        masks, mask = workspace.masklet(track), workspace.track(track).mask
        frames = sorted({round(f) for f in np.linspace(0, len(masks) - 1, min(STILLS, len(masks)))})
        return {f"frame {f}": _still(workspace, f, masks[f], mask, STILL_WIDTH) for f in frames}
    if made is not None:
        frame = workspace.mask(made).frame
        label = f"{made}, frame {frame}" if workspace.clip else made
        return {label: _still(workspace, frame, workspace.rle(made), made, WIDTH)}
    return {}


def _still(workspace: Workspace, frame: int, mask: RLE, name: str, width: int) -> Image.Image:
    """Draw a mask on the frame at the size of the page, or its contour would be too thin to see."""
    picture = _smaller(opened(workspace.frames[frame]), width)
    small = np.asarray(Image.fromarray(rle.decode(mask)).resize(picture.size, Image.Resampling.NEAREST))
    before = [None] * workspace.names("mask").index(name)
    return overlay.draw(picture, [*before, rle.encode(small)])


def _smaller(picture: Image.Image, width: int) -> Image.Image:
    scale = width / max(picture.size)
    if scale >= 1:
        return picture
    return picture.resize(
        (max(1, round(picture.width * scale)), max(1, round(picture.height * scale))),
        Image.Resampling.LANCZOS,
    )


def _webp(picture: Image.Image) -> bytes:
    encoded = io.BytesIO()
    _smaller(picture, WIDTH).save(encoded, "WEBP", quality=QUALITY)
    return encoded.getvalue()
