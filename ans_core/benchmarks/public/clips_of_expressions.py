"""What the video referring benchmarks share: a mask in every frame for every expression against the true
ones, both from files.

--predictions: a folder `<video>/<expression>/<frame>.png` (grey, 0 = background); or upstream's results.json
{video: {expression: {"prediction_masks": [RLE per frame]}}}; or a line an expression {"video", "expression",
"prediction_masks"}. --data: a folder with meta_expressions*.json and mask_dict.json (MeViS' layout). All
frames count; J and F are averaged over an expression's frames, then over expressions. A missing prediction
counts 0.

A model is run on a folder of that layout with JPEGImages/<video>/<frame>.jpg, or on the folder of a release
that has one a split; without mask_dict.json (MeViS val, Ref-YouTube-VOS: on the servers) its predictions are
not scored but submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner, UnscoredError
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.mask import counts
from ans_core.metrics.video import j_and_f
from ans_core.pictures import rle
from ans_core.types import RLE, Prediction, Request

DATA = "folder with meta_expressions*.json and mask_dict.json"
SAMPLE_ID = ("video", "expression")
QUESTION = "<image>\nPlease segment {}."
"""Upstream's."""
TRUTH = "mask_dict.json"


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One expression."""

    video: str
    expression: str
    record: files.Record
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


def score(inputs: Inputs) -> Scored:
    """Score a benchmark that has no figures beyond those that all share."""
    return scored(results(inputs), notes=[])


def results(inputs: Inputs) -> list[Result]:
    return [result(clip) for clip in clips(inputs)]


def result(clip: Clip) -> Result:
    j, f = 0.0, 0.0
    if clip.prediction is not None:
        frames = [j_and_f(p, t) for p, t in zip(clip.prediction, clip.truth, strict=True)]
        j, f = (float(np.mean(values)) for values in zip(*frames, strict=True))
    text = str(clip.record.get("exp", ""))
    return Result(
        video=clip.video, expression=clip.expression, text=text, missing=clip.prediction is None, j=j, f=f
    )


def figures(clip_results: list[Result]) -> dict[str, float]:
    j, f = (float(np.mean([getattr(r, key) for r in clip_results])) for key in ("j", "f"))
    return {"J&F": (j + f) / 2, "J": j, "F": f, "expressions": len(clip_results)}


def scored(clip_results: list[Result], *, notes: list[str], more: dict[str, float] | None = None) -> Scored:
    metrics = figures(clip_results)
    js, fs = [r.j for r in clip_results], [r.f for r in clip_results]
    return Scored(
        metrics=metrics | (more or {}),
        published={key: percent(metrics[key]) for key in ("J&F", "J", "F")},
        ratios={
            "J&F": Ratio(numerators=[(j + f) / 2 for j, f in zip(js, fs, strict=True)]),
            "J": Ratio(numerators=js),
            "F": Ratio(numerators=fs),
        },
        samples=[
            {"video": r.video, "expression": r.expression, "text": r.text, "J": r.j, "F": r.f}
            for r in clip_results
        ],
        missing=sum(r.missing for r in clip_results),
        notes=["all frames count; the mean over frames first, then over expressions", *notes],
    )


def clips(inputs: Inputs) -> Iterator[Clip]:
    videos, mask_dict = _videos(inputs.truth), _mask_dict(files.named(inputs.truth, TRUTH))
    stored = _stored(inputs.predictions)
    names = [f"{video}/{number}" for video, record in videos.items() for number in record["expressions"]]
    files.refuse_unknown(stored, names, where=inputs.predictions, what="expressions")
    for video, record in videos.items():
        frames = record["frames"]
        for number, expression in _expressions(record):
            entry = stored.get(f"{video}/{number}")
            if entry is None and inputs.predicted_only:
                continue
            truth = _truth(mask_dict, expression, frames)
            prediction = None
            if entry is not None:
                prediction = _prediction(entry, frames, truth, f"{inputs.predictions}, {video}/{number}")
                truth = truth or [rle.empty(*frame["size"]) for frame in prediction]
            yield Clip(video=video, expression=number, record=expression, truth=truth, prediction=prediction)


def _videos(data: Path) -> dict[str, files.Record]:
    """What its file of expressions holds by video."""
    metas = sorted(data.glob("meta_expressions*.json")) if data.is_dir() else []
    if len(metas) != 1:
        raise ValueError(
            f"{data}: expected one meta_expressions*.json, found {[m.name for m in metas]}; give one "
            "split's folder"
        )
    entries = files.Record(files.load(metas[0]), str(metas[0])).record("videos")
    videos = {name: files.Record(entry, f"{metas[0]}, {name}") for name, entry in entries.items()}
    if not videos:
        raise ValueError(f"{metas[0]}: 'videos' is empty")
    for video in videos.values():
        if not video.listed("frames", str) or not _expressions(video):
            raise ValueError(f"{video.where}: without frames, or without expressions")
    return videos


def _expressions(video: files.Record) -> list[tuple[str, files.Record]]:
    """(its number, the entry) of each."""
    entries = video.record("expressions")
    return [(number, files.Record(one, f"{video.where}/{number}")) for number, one in entries.items()]


def _mask_dict(path: Path) -> files.Record:
    """Masklets by their id."""
    masklets = files.Record(files.load(path), str(path))
    for i in masklets:
        masklets.listed(i)
    return masklets


def _stored(predictions: Path) -> Mapping[str, Any]:
    """Predictions by `<video>/<expression>`: records, or folders of PNGs."""
    if predictions.is_dir():
        root = predictions / "Annotations" if (predictions / "Annotations").is_dir() else predictions
        inner = (path for path in sorted(root.glob("*/*")) if path.is_dir())
        return {f"{path.parent.name}/{path.name}": path for path in inner}
    if ".jsonl" in predictions.suffixes:
        return files.Lines(predictions, lambda line: "/".join(str(line.value(key)) for key in SAMPLE_ID))
    videos = files.Record(files.load(predictions), str(predictions))
    return {
        f"{video}/{number}": record for video in videos for number, record in videos.record(video).items()
    }


def _truth(mask_dict: files.Record, expression: files.Record, frames: list[str]) -> list[RLE]:
    """All the expression's objects together. null = the object is not to be seen; never to be seen, or no
    object: []."""
    where, ids = expression.where, [str(i) for i in expression.listed("anno_id")]
    if absent := [i for i in ids if i not in mask_dict]:
        raise ValueError(f"{where}: {TRUTH} has no {files.shown(absent)}; both files must be of one release")
    if short := [i for i in ids if len(mask_dict[i]) != len(frames)]:
        raise ValueError(
            f"{where}: {TRUTH}'s {files.shown(short)} has not {len(frames)} entries, one a frame"
        )
    first = next((m for i in ids for m in mask_dict[i] if m is not None), None)
    if first is None:
        return []
    size = files.mask_size(first, where=f"{where}, {TRUTH}")
    masklets = [mask_dict.masklet(i, frames, size) for i in ids]
    return [rle.union(list(frame)) for frame in zip(*masklets, strict=True)]


def _prediction(entry: Any, frames: list[str], truth: list[RLE], where: str) -> list[RLE]:
    if isinstance(entry, Path):
        entry = {"prediction_masks": [rle.encode(labels > 0) for labels in files.index_masks(entry, frames)]}
    record = files.Record(entry, where)
    masks = record.listed("prediction_masks")
    first = next((m for m in (*truth, *masks) if m is not None), {"size": [1, 1]})
    return record.masklet("prediction_masks", frames, files.mask_size(first, where=where))


def scorer(
    score: Callable[[Inputs], Scored],
    *splits: str,
    data: str = DATA,
    question: Callable[[str], str] = QUESTION.format,
    needs: Callable[[Path, str], object] = lambda truth, split: None,
) -> Scorer:
    """Return the benchmark of these splits, a model's own first. needs: `Runner.needs`."""
    runner = Runner(
        items=partial(items, splits=splits, question=question),
        record=record,
        splits=splits,
        truth=truth_folder,
        running=("J", mean_j),
        split_of=partial(split_of, splits=splits),
        needs=needs,
    )
    return Scorer(
        score=score, data=data, options=frozenset({"predicted_only"}), sample_id=SAMPLE_ID, runner=runner
    )


def split_of(folder: Path, *, splits: tuple[str, ...]) -> str:
    """Return the first split that a release's folder has; else the folder is the split."""
    return next((split for split in splits if split_folder(folder, split) != folder), folder.name)


def items(
    folder: Path, split: str, *, splits: tuple[str, ...], question: Callable[[str], str]
) -> Iterator[Item]:
    """The expressions, clip by clip. A `split` that is none of `splits` needs a folder of that name."""
    from ans_core.pictures import transforms

    folder = split_folder(folder, split)
    if split not in (*splits, folder.name):
        raise ValueError(
            f"{folder} has no folder of split {split!r}; the benchmark's splits are {', '.join(splits)}"
        )
    videos = _videos(folder)
    pictures = files.pictures(
        folder, "JPEGImages", f"../../{folder.name}/JPEGImages", "../JPEGImages/480p", "../JPEGImages"
    )
    mask_dict = _mask_dict(folder / TRUTH) if (folder / TRUTH).is_file() else None
    for video, described in videos.items():
        names = described["frames"]
        frames = tuple(files.picture(pictures / video, frame, where=described.where) for frame in names)
        (width, height), _ = transforms.stored(frames[0])
        for number, expression in _expressions(described):
            text = expression.text("exp")
            truth = None
            if mask_dict is not None:
                nothing = [rle.empty(height, width)] * len(frames)
                truth = Prediction(text="", masks=(tuple(_truth(mask_dict, expression, names) or nothing),))
            yield Item(
                name=f"{video}/{number}",
                request=Request(frames=frames, text=question(text), clip=True),
                facts={
                    "video": video,
                    "expression": number,
                    "exp": text,
                    "frames": names,
                    "size": [height, width],
                },
                truth=truth,
                expression=text,
            )


def split_folder(folder: Path, split: str) -> Path:
    """A release's folder of the split, in either layout; or `folder` itself, given as that."""
    inner = [folder / split, folder / "meta_expressions" / split]
    return next((path for path in inner if path.is_dir()), folder)


def truth_folder(folder: Path, split: str) -> Path:
    folder = split_folder(folder, split)
    if not (folder / TRUTH).is_file():
        raise UnscoredError(
            f"{folder / TRUTH} is not there (the split's masks are on the server): `ans eval submit` writes "
            "the file for it"
        )
    return folder


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    """The first `[SEG]` counts; none = no mask in any frame."""
    masks = prediction.masks[0] if prediction.masks else [None] * len(item.request.frames)
    return {**item.facts, "text": prediction.text, "prediction_masks": masks}


def mean_j(item: Item, prediction: Prediction) -> float:
    """J alone: F would take longer than the model's answer at small sizes."""
    assert item.truth is not None
    nothing = rle.empty(*item.facts["size"])
    predicted = prediction.masks[0] if prediction.masks else [None] * len(item.request.frames)
    pairs = zip(predicted, item.truth.masks[0], strict=True)
    return float(np.mean([counts(mask or nothing, real or nothing).iou for mask, real in pairs]))
