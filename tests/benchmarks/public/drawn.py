"""Small masks and files that the tests of public scorers share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ans_core.benchmarks.public import SCORERS, Given, Scored
from ans_core.pictures import rle

H, W = 6, 10


def columns(start: int, end: int) -> np.ndarray:
    mask = np.zeros((H, W), bool)
    mask[:, start:end] = True
    return mask


def coded(start: int, end: int) -> dict[str, Any]:
    return rle.encode(columns(start, end))


def score(name: str, predictions: Path, **others: Any) -> Scored:
    return SCORERS[name].score(Given(predictions=predictions, **others))


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, value)) if path.suffix == ".jsonl" else json.dumps(value))
    return path


def write_index_masks(folder: Path, frames: list[np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for t, frame in enumerate(frames):
        picture = Image.fromarray(frame.astype(np.uint8), "P")
        picture.putpalette([i for level in range(256) for i in (level, 0, 255 - level)])
        picture.save(folder / f"{t:05d}.png")
    return folder
