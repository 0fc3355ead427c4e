"""What the video referring benchmarks share: a mask in every frame for every expression against the true ones, both from files.

--predictions: a folder `<video>/<expression>/<frame>.png` (grey, 0 = background); or upstream's results.json {video: {expression:
{"prediction_masks": [RLE per frame]}}}. --data: a folder with meta_expressions*.json and mask_dict.json (MeViS' layout).
All frames count; J and F are averaged over an expression's frames, then over expressions. A missing prediction counts 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ans_core import rle
from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Given, Scored, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.video import j_and_f
from ans_core.types import RLE

DATA = "folder with meta_expressions*.json and mask_dict.json"


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One expression."""

    video: str
    expression: str
    record: dict[str, Any]
    """Its entry in meta_expressions.json."""
    truth: list[RLE]
    prediction: list[RLE] | None
    """None: missing."""

    @property
    def name(self) -> str:
        return f"{self.video}/{self.expression}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Without the masks, so that those of one expression at a time are in memory."""

    video: str
    expression: str
    text: str
    missing: bool
    j: float
    f: float


def results(given: Given) -> list[Result]:
    return [result(clip) for clip in clips(given)]


def result(clip: Clip) -> Result:
    j, f = 0.0, 0.0
    if clip.prediction is not None:
        frames = [j_and_f(p, t) for p, t in zip(clip.prediction, clip.truth, strict=True)]
        j, f = (float(np.mean(values)) for values in zip(*frames, strict=True))
    text = str(clip.record.get("exp", ""))
    return Result(video=clip.video, expression=clip.expression, text=text, missing=clip.prediction is None, j=j, f=f)


def figures(found: list[Result]) -> dict[str, float]:
    j, f = (float(np.mean([getattr(r, key) for r in found])) for key in ("j", "f"))
    return {"J&F": (j + f) / 2, "J": j, "F": f, "expressions": len(found)}


def scored(found: list[Result], *, notes: list[str], more: dict[str, float] | None = None) -> Scored:
    metrics = figures(found)
    js, fs = [r.j for r in found], [r.f for r in found]
    return Scored(
        metrics=metrics | (more or {}),
        published={key: percent(metrics[key]) for key in ("J&F", "J", "F")},
        ratios={
            "J&F": Ratio(numerators=[(j + f) / 2 for j, f in zip(js, fs, strict=True)]),
            "J": Ratio(numerators=js),
            "F": Ratio(numerators=fs),
        },
        samples=[{"video": r.video, "expression": r.expression, "text": r.text, "J": r.j, "F": r.f} for r in found],
        missing=sum(r.missing for r in found),
        notes=["all frames count; the mean over frames first, then over expressions", *notes],
    )


def clips(given: Given) -> Iterator[Clip]:
    assert given.data is not None
    data, predictions = given.data, given.predictions
    metas = sorted(data.glob("meta_expressions*.json")) if data.is_dir() else []
    if len(metas) != 1:
        raise ValueError(f"{data}: expected one meta_expressions*.json, found {[m.name for m in metas]}; give one split's folder")
    videos = files.value(files.load(metas[0]), "videos", where=str(metas[0]))
    mask_dict = files.load(files.named(data, "mask_dict.json"))
    stored = files.load(predictions) if predictions.is_file() else _folders(predictions)
    if not isinstance(stored, dict) or not all(isinstance(expressions, dict) for expressions in stored.values()):
        raise ValueError(f"{predictions}: not {{video: {{expression: {{'prediction_masks': ...}}}}}}")
    names = [f"{video}/{number}" for video, record in videos.items() for number in record["expressions"]]
    predicted = [f"{video}/{number}" for video, expressions in stored.items() for number in expressions]
    files.refuse_unknown(predicted, names, where=predictions, what="expressions")
    for video, record in videos.items():
        for number, expression in record["expressions"].items():
            where = f"{metas[0]}, {video}/{number}"
            truth = _truth(mask_dict, expression, record["frames"], where)
            drawn = stored.get(video, {}).get(str(number))
            prediction = None
            if drawn is not None:
                prediction = _prediction(drawn, record["frames"], truth, f"{predictions}, {video}/{number}")
                truth = truth or [rle.empty(*frame["size"]) for frame in prediction]
            yield Clip(video=video, expression=str(number), record=expression, truth=truth, prediction=prediction)


def _folders(root: Path) -> dict[str, dict[str, Path]]:
    root = root / "Annotations" if (root / "Annotations").is_dir() else root
    return {
        video.name: {one.name: one for one in sorted(video.iterdir()) if one.is_dir()} for video in sorted(root.iterdir()) if video.is_dir()
    }


def _truth(mask_dict: dict[str, Any], expression: dict[str, Any], frames: list[str], where: str) -> list[RLE]:
    """All the expression's objects together. null = the object is not to be seen; never to be seen, or no object: []."""
    ids = [str(i) for i in files.value(expression, "anno_id", where=where)]
    if absent := [i for i in ids if i not in mask_dict]:
        raise ValueError(f"{where}: mask_dict.json has no {files.shown(absent)}; both files must be of one release")
    if short := [i for i in ids if len(mask_dict[i]) != len(frames)]:
        raise ValueError(f"{where}: mask_dict.json's {files.shown(short)} has not {len(frames)} entries, one a frame")
    size = next((m["size"] for i in ids for m in mask_dict[i] if m), None)
    if size is None:
        return []
    height, width = size
    masklets = [[files.mask(m, height=height, width=width, where=f"{where}, {i}") for m in mask_dict[i]] for i in ids]
    return [rle.union(list(frame)) for frame in zip(*masklets, strict=True)]


def _prediction(drawn: Any, frames: list[str], truth: list[RLE], where: str) -> list[RLE]:
    masks = _of_folder(drawn, frames) if isinstance(drawn, Path) else files.listed(drawn, "prediction_masks", where=where)
    if len(masks) != len(frames):
        raise ValueError(f"{where}: {len(masks)} masks for {len(frames)} frames")
    known = next((m for m in (*truth, *masks) if m is not None), {"size": [1, 1]})
    height, width = files.mask_size(known, where=where)
    return [files.mask(m, height=height, width=width, where=f"{where}, frame {frame}") for m, frame in zip(masks, frames, strict=True)]


def _of_folder(folder: Path, frames: list[str]) -> list[RLE]:
    if absent := [frame for frame in frames if not (folder / f"{frame}.png").is_file()]:
        raise ValueError(f"{folder}: {len(absent)} of {len(frames)} frames are not there: {files.shown(absent)}")
    return [rle.encode(files.index_mask(folder / f"{frame}.png") > 0) for frame in frames]
