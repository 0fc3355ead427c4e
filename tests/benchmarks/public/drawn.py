"""Small masks and files that the tests of public scorers share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ans_core.benchmarks.public.asked import Answerer, Runner
from ans_core.benchmarks.public.scored import Inputs, Scored
from ans_core.benchmarks.registry import SCORERS
from ans_core.evaluation.predictions import by_picture, limited, predict_all
from ans_core.pictures import rle

H, W = 6, 10


def columns(start: int, end: int) -> np.ndarray:
    mask = np.zeros((H, W), bool)
    mask[:, start:end] = True
    return mask


def coded(start: int, end: int) -> dict[str, Any]:
    return rle.encode(columns(start, end))


def score(name: str, predictions: Path, **others: Any) -> Scored:
    return SCORERS[name].score(Inputs(predictions=predictions, **others))


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


def predicted(
    runner: Runner, data: Path, split: str, ask: Answerer, out: Path, *, limit: int = 0, batch: int = 2
) -> Path:
    """Run a model on a benchmark and return its predictions."""
    items = limited(lambda: runner.items(data, split), limit, runner.group)
    return predict_all(by_picture(items, batch), ask, runner.record, out=out, desc="", running=runner.running)
