"""Semi-supervised video object segmentation (DAVIS 2017, MOSE, SA-V): folders of PNGs of object numbers -> J, F, J&F.

Two public conventions give different numbers for the same masks; a figure names its own.
    davis   davis2017-evaluation: the objects of the first true frame, every frame but the first and last; frames before an object appears
            count (1 where nothing is drawn); 255 is void and becomes background.
    mose    vos-benchmark, SA-V's too: every object of the truth, from the first frame on in which truth or prediction shows it, without
            the clip's first and last frame; every number is an object.
Both average over an object's frames, then over the objects of all videos.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from ans_core import rle
from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Given, Scored, Scorer, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.video import Statistics, j_and_f, statistics

VOID = 255
IndexMask = UInt8[np.ndarray, "H W"]


@dataclass(frozen=True, kw_only=True)
class Clip:
    name: str
    truth: list[IndexMask]
    predictions: list[IndexMask]


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """One object's frames."""

    clip: str
    object_id: int
    j: list[float]
    f: list[float]


def score(given: Given) -> Scored:
    conventions: dict[str, Callable[[Clip], list[Tracked]]] = {"davis": davis, "mose": mose}
    convention = given.convention or "davis"
    if convention not in conventions:
        raise ValueError(f"--convention {convention}: one of {', '.join(conventions)}")
    tracked: list[Tracked] = []
    voids = 0
    for clip in clips(given.predictions, given.data):
        if not any(((frame > 0) & (frame != VOID)).any() for frame in clip.truth):
            raise ValueError(f"{clip.name}: the truth holds no object, only background and void")
        voids += convention == "mose" and any((frame == VOID).any() for frame in clip.truth)
        tracked += conventions[convention](clip)
    if not tracked:
        raise ValueError(f"{given.data or given.predictions}: no object in the frames that count (the first and last of a clip don't)")
    return _scored(tracked, convention, voids)


def davis(clip: Clip) -> list[Tracked]:
    truth = [np.where(frame == VOID, 0, frame) for frame in clip.truth]
    objects, drawn = int(truth[0].max()), int(max(frame.max() for frame in clip.predictions))
    if not objects:
        raise ValueError(f"{clip.name}: no object in the first true frame, from which DAVIS takes the objects")
    if drawn > objects:
        raise ValueError(f"{clip.name}: a predicted mask holds object {drawn}; the first true frame has objects 1 to {objects}")
    return [_tracked(clip, k, truth[1:-1], clip.predictions[1:-1]) for k in range(1, objects + 1)]


def mose(clip: Clip) -> list[Tracked]:
    truth, predictions = clip.truth[1:-1], clip.predictions[1:-1]
    there = [set(np.unique(frame).tolist()) - {0} for frame in truth]
    either = [seen | set(np.unique(drawn).tolist()) - {0} for seen, drawn in zip(there, predictions, strict=True)]
    found = []
    for k in sorted(set().union(*there)):
        start = next(t for t, seen in enumerate(either) if k in seen)
        found.append(_tracked(clip, k, truth[start:], predictions[start:]))
    return found


def _tracked(clip: Clip, k: int, truth: list[IndexMask], predictions: list[IndexMask]) -> Tracked:
    j, f = zip(*(j_and_f(drawn == k, real == k) for drawn, real in zip(predictions, truth, strict=True)), strict=True)
    return Tracked(clip=clip.name, object_id=k, j=list(j), f=list(f))


def _scored(tracked: list[Tracked], convention: str, voids: int) -> Scored:
    js, fs = [statistics(t.j) for t in tracked], [statistics(t.f) for t in tracked]
    metrics: dict[str, float] = {}
    for name, found in (("J", js), ("F", fs)):
        metrics |= {f"{name}": _mean(s.mean for s in found)}
        if convention == "davis":
            metrics |= {f"{name}_recall": _mean(s.recall for s in found), f"{name}_decay": _mean(s.decay for s in found)}
    both = [(j.mean + f.mean) / 2 for j, f in zip(js, fs, strict=True)]
    metrics = {"J&F": (metrics["J"] + metrics["F"]) / 2} | metrics | {"objects": len(tracked), "videos": len({t.clip for t in tracked})}
    notes = [f"convention {convention}: " + {"davis": "davis2017-evaluation", "mose": "vos-benchmark and SA-V"}[convention]]
    if convention == "davis" and any(len(t.j) > 256 for t in tracked):
        notes.append("decay of clips longer than 256 frames: of their quarters; davis2017-evaluation counts frames in 8 bits there")
    if voids:
        notes.append(f"{voids} videos hold the number 255, which this convention counts as an object")
    return Scored(
        metrics=metrics,
        published={key: percent(metrics[key]) for key in ("J&F", "J", "F")},
        ratios={"J&F": Ratio(numerators=both), "J": Ratio(numerators=[s.mean for s in js]), "F": Ratio(numerators=[s.mean for s in fs])},
        samples=[_record(t, j, f) for t, j, f in zip(tracked, js, fs, strict=True)],
        notes=notes,
    )


def _record(tracked: Tracked, j: Statistics, f: Statistics) -> dict[str, Any]:
    figures = {f"{name}_{key}": getattr(s, key) for name, s in (("J", j), ("F", f)) for key in ("mean", "recall", "decay")}
    return {"video": tracked.clip, "object": tracked.object_id, "frames": len(tracked.j), **figures}


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))


def clips(predictions: Path, data: Path | None) -> Iterator[Clip]:
    """One video at a time. Without --data the predictions are JSON files that hold the truth too (`sequence`, `objects`: `id`, `truth`,
    `prediction`)."""
    if data is None:
        yield from _recorded(predictions)
        return
    if predictions.is_file():
        raise ValueError(f"{predictions} is a file, which holds its truth itself; leave --data out, or give the folder of predicted PNGs")
    true_root, drawn_root = _annotations(data), _annotations(predictions)
    files.refuse_same(drawn_root, true_root)
    true_videos, drawn_videos = _folders(true_root), _folders(drawn_root)
    if not true_videos:
        raise ValueError(f"{true_root}: no folder of a video in it")
    for have, lack, where in ((drawn_videos, true_videos, true_root), (true_videos, drawn_videos, drawn_root)):
        if extra := [name for name in have if name not in lack]:
            raise ValueError(
                f"{where}: {len(extra)} videos are not there: {files.shown(extra)}; truth and predictions must be of the same videos"
            )
    for name in true_videos:
        objects = _folders(true_root / name)
        if not objects:
            yield _clip(name, true_root / name, drawn_root / name, of_one=False)
        for one in objects:  # SA-V: a folder for every object, which may overlap
            yield _clip(f"{name}/{one}", true_root / name / one, drawn_root / name / one, of_one=True)


def _annotations(root: Path) -> Path:
    """DAVIS' and MOSE's own folders may be given whole."""
    for inner in ("Annotations", "480p"):
        if (root / inner).is_dir():
            root = root / inner
    return root


def _folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def _clip(name: str, truth: Path, drawn: Path, *, of_one: bool) -> Clip:
    frames = sorted(path.name for path in truth.glob("*.png"))
    if len(frames) < 3:
        raise ValueError(f"{truth}: {len(frames)} PNGs; the first and last don't count, so at least 3 are needed")
    if absent := [frame for frame in frames if not (drawn / frame).is_file()]:
        raise ValueError(f"{drawn}: {len(absent)} of {len(frames)} frames are not there: {files.shown(absent)}")
    real, predicted = ([files.index_mask(folder / frame) for frame in frames] for folder in (truth, drawn))
    for frame, one, other in zip(frames, real, predicted, strict=True):
        if one.shape != other.shape or one.shape != real[0].shape:
            raise ValueError(
                f"{drawn / frame}: [height, width] {other.shape}, the truth's is {one.shape}, its first frame's {real[0].shape}"
            )
        if of_one and max(len(np.unique(one)), len(np.unique(other))) > 2:
            raise ValueError(f"{drawn / frame}: more than one object in the folder of one")
    if of_one:
        real, predicted = ([(frame > 0).astype(np.uint8) for frame in listed] for listed in (real, predicted))
    return Clip(name=name, truth=real, predictions=predicted)


def _recorded(path: Path) -> Iterator[Clip]:
    sources = [path] if path.is_file() else sorted(itertools.chain(path.glob("*.json"), path.glob("*.json.gz")))
    found = False
    for source in sources:
        record = files.load(source)
        if isinstance(record, dict) and {"sequence", "height", "width", "objects"} <= set(record):
            found = True
            yield Clip(name=record["sequence"], truth=_drawn(record, "truth", source), predictions=_drawn(record, "prediction", source))
    if not found:
        raise ValueError(f"{path}: no file with sequence, height, width and objects; for folders of PNGs give the truth with --data")


def _drawn(record: dict[str, Any], key: str, source: Path) -> list[IndexMask]:
    height, width = record["height"], record["width"]
    lengths = {len(files.value(one, which, where=str(source))) for one in record["objects"] for which in ("truth", "prediction")}
    if len(lengths) != 1:
        raise ValueError(f"{source}: masks of {sorted(lengths)} frames; every object needs one, or null, in every frame")
    frames = [np.zeros((height, width), np.uint8) for _ in range(lengths.pop())]
    for one in record["objects"]:
        for t, found in enumerate(one[key]):
            where = f"{source}, object {one['id']}, frame {t}"
            pixels = rle.decode(files.mask(found, height=height, width=width, where=where))
            if frames[t][pixels].any():
                raise ValueError(f"{where}: the {key} overlaps another object's; a PNG of object numbers could not hold it")
            frames[t][pixels] = one["id"]
    return frames


SCORER = Scorer(
    score=score, data="folder of the true PNGs", needs_data=False, sample_id=("video", "object"), options=frozenset({"convention"})
)
