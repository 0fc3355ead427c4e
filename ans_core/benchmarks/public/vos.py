"""Semi-supervised video object segmentation (DAVIS 2017, MOSE, SA-V): folders of PNGs of object numbers -> J, F, J&F.

Two public conventions give different numbers for the same masks; a figure names its own.
    davis   davis2017-evaluation: the objects of the first true frame, every frame but the first and last; frames before an object appears
            count (1 where nothing is drawn); 255 is void and becomes background.
    mose    vos-benchmark, SA-V's too: every object of the truth, from the first frame on in which truth or prediction shows it, without
            the clip's first and last frame; every number is an object.
Both average over an object's frames, then over the objects of all videos. Files: vos_files.py; how a SAM2 is run: vos_items.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ans_core.benchmarks.public import vos_items
from ans_core.benchmarks.public.scored import Given, Scored, Scorer, percent
from ans_core.benchmarks.public.vos_files import Clip, IndexMask, clips
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.video import Statistics, j_and_f, statistics
from ans_core.object_numbers import VOID


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
    for clip in clips(given):
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
        raise ValueError(
            f"{clip.name}: a predicted mask holds object {drawn}; the first true frame has objects 1 to {objects}; "
            "--convention mose also scores objects that appear later"
        )
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
        ratios={"J&F": Ratio(numerators=both)} | _ratios("J", js, convention) | _ratios("F", fs, convention),
        samples=[_record(t, j, f) for t, j, f in zip(tracked, js, fs, strict=True)],
        notes=notes,
    )


def _ratios(name: str, found: list[Statistics], convention: str) -> dict[str, Ratio]:
    means = {name: Ratio(numerators=[s.mean for s in found])}
    if convention == "davis":
        means |= {f"{name}_{key}": Ratio(numerators=[getattr(s, key) for s in found]) for key in ("recall", "decay")}
    return means


def _record(tracked: Tracked, j: Statistics, f: Statistics) -> dict[str, Any]:
    figures = {f"{name}_{key}": getattr(s, key) for name, s in (("J", j), ("F", f)) for key in ("mean", "recall", "decay")}
    return {"video": tracked.clip, "object": tracked.object_id, "frames": len(tracked.j), **figures}


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))


SCORER = Scorer(
    score=score,
    data="folder of the true PNGs",
    needs_data=False,
    sample_id=("video", "object"),
    options=frozenset({"convention", "split", "predicted_only"}),
    runner=vos_items.RUNNER,
)
