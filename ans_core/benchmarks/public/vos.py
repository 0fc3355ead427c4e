"""Semi-supervised video object segmentation (DAVIS 2017, MOSE, SA-V): folders of PNGs of object numbers -> J,
F, J&F.

Public conventions give different numbers for the same masks; a figure names its own.
    davis   the objects up to the highest number of the first true frame, every frame but the first and last; frames before an object
            appears count (1 where nothing is drawn); 255 is void and becomes background.
    davis2017-evaluation
            DAVIS' own code: as `davis`, but a number below the highest counts as an object even if no true pixel has it (1 where nothing
            is drawn). The two are equal where object numbers have no gaps, as in DAVIS.
    mose    vos-benchmark, SA-V's too: every object of the truth, from the first frame on in which truth or prediction shows it, without
            the clip's first and last frame; every number is an object.
All average over an object's frames, then over the objects of all videos. Files: vos_files.py; how a SAM2 is
run: vos_items.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ans_core.benchmarks.public import vos_items
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.benchmarks.public.vos_files import Clip, IndexMask, clips
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.video import j_and_f, statistics
from ans_core.pictures.object_numbers import VOID


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """One object's frames."""

    clip: str
    object_id: int
    j: list[float]
    f: list[float]


def score(inputs: Inputs) -> Scored:
    convention = inputs.convention or "davis"
    if convention not in CONVENTIONS:
        raise ValueError(f"--convention {convention}: one of {', '.join(CONVENTIONS)}")
    tracked: list[Tracked] = []
    voids, gaps = 0, 0
    for clip in clips(inputs):
        if not any(((frame > 0) & (frame != VOID)).any() for frame in clip.truth):
            raise ValueError(f"{clip.name}: the truth holds no object, only background and void")
        voids += convention == "mose" and any((frame == VOID).any() for frame in clip.truth)
        gaps += convention != "mose" and len(existing(clip)) < highest(clip)
        tracked += CONVENTIONS[convention](clip)
    if not tracked:
        raise ValueError(
            f"{inputs.data or inputs.predictions}: no object in the frames that count (the first and last of "
            "a clip don't)"
        )
    return _scored(tracked, convention, voids, gaps)


def highest(clip: Clip) -> int:
    """Return the highest object number of the first true frame."""
    if number := int(np.where(clip.truth[0] == VOID, 0, clip.truth[0]).max()):
        return number
    raise ValueError(f"{clip.name}: no object in the first true frame, from which DAVIS takes the objects")


def existing(clip: Clip) -> list[int]:
    """Return the numbers up to the highest that a pixel of some true frame has, in rising order."""
    there = {int(n) for frame in clip.truth for n in np.unique(frame)}
    return [n for n in range(1, highest(clip) + 1) if n in there]


def davis(clip: Clip) -> list[Tracked]:
    return _numbered(clip, existing(clip))


def davis2017_evaluation(clip: Clip) -> list[Tracked]:
    return _numbered(clip, list(range(1, highest(clip) + 1)))


def _numbered(clip: Clip, numbers: list[int]) -> list[Tracked]:
    predicted = {int(n) for frame in clip.predictions for n in np.unique(frame)}
    if other := sorted(predicted - {0, *numbers}):
        raise ValueError(
            f"{clip.name}: a predicted mask holds object {other[0]}; the truth, up to the highest number of "
            "its first frame, has objects"
            f" {', '.join(map(str, numbers))}; --convention mose also scores objects that appear later"
        )
    truth = [np.where(frame == VOID, 0, frame) for frame in clip.truth]
    return [_tracked(clip, k, truth[1:-1], clip.predictions[1:-1]) for k in numbers]


def mose(clip: Clip) -> list[Tracked]:
    truth, predictions = clip.truth[1:-1], clip.predictions[1:-1]
    there = [set(np.unique(frame).tolist()) - {0} for frame in truth]
    either = [
        seen | set(np.unique(predicted).tolist()) - {0}
        for seen, predicted in zip(there, predictions, strict=True)
    ]
    tracked = []
    for k in sorted(set().union(*there)):
        start = next(t for t, seen in enumerate(either) if k in seen)
        tracked.append(_tracked(clip, k, truth[start:], predictions[start:]))
    return tracked


CONVENTIONS: dict[str, Callable[[Clip], list[Tracked]]] = {
    "davis": davis,
    "davis2017-evaluation": davis2017_evaluation,
    "mose": mose,
}


def _tracked(clip: Clip, k: int, truth: list[IndexMask], predictions: list[IndexMask]) -> Tracked:
    j, f = zip(
        *(j_and_f(predicted == k, real == k) for predicted, real in zip(predictions, truth, strict=True)),
        strict=True,
    )
    return Tracked(clip=clip.name, object_id=k, j=list(j), f=list(f))


def _scored(tracked: list[Tracked], convention: str, voids: int, gaps: int) -> Scored:
    columns: dict[str, list[float]] = {}
    for name in ("J", "F"):
        stats = [statistics(getattr(t, name.lower())) for t in tracked]
        columns |= {f"{name}_{key}": [getattr(s, key) for s in stats] for key in ("mean", "recall", "decay")}
    shown = {
        key.removesuffix("_mean"): values
        for key, values in columns.items()
        if convention != "mose" or key.endswith("_mean")
    }
    metrics = {name: float(np.mean(values)) for name, values in shown.items()}
    metrics = {"J&F": (metrics["J"] + metrics["F"]) / 2} | metrics
    both = [(j + f) / 2 for j, f in zip(shown["J"], shown["F"], strict=True)]
    return Scored(
        metrics=metrics | {"objects": len(tracked), "videos": len({t.clip for t in tracked})},
        published={key: percent(metrics[key]) for key in ("J&F", "J", "F")},
        ratios={"J&F": Ratio(numerators=both)}
        | {name: Ratio(numerators=values) for name, values in shown.items()},
        samples=[
            {"video": t.clip, "object": t.object_id, "frames": len(t.j)}
            | {key: values[n] for key, values in columns.items()}
            for n, t in enumerate(tracked)
        ],
        notes=_notes(tracked, convention, voids, gaps),
    )


def _notes(tracked: list[Tracked], convention: str, voids: int, gaps: int) -> list[str]:
    if convention == "mose":
        void = f"{voids} videos hold the number 255, which this convention counts as an object"
        return ["convention mose: vos-benchmark and SA-V", *([void] if voids else [])]
    notes = [f"convention {convention}: davis2017-evaluation"]
    if gaps:
        notes.append(
            f"{gaps} videos have gaps in their object numbers: "
            + (
                "only objects that exist are counted; --convention davis2017-evaluation also counts the missing "
                "numbers, as DAVIS' own code does"
                if convention == "davis"
                else "the missing numbers, which don't exist, count as objects"
            )
        )
    if any(len(t.j) > 256 for t in tracked):
        notes.append(
            "decay of clips longer than 256 frames: of their quarters; davis2017-evaluation counts frames "
            "in 8 bits there"
        )
    return notes


SCORER = Scorer(
    score=score,
    data="folder of the true PNGs",
    data_optional=True,
    sample_id=("video", "object"),
    options=frozenset({"convention", "split", "predicted_only"}),
    runner=vos_items.RUNNER,
)
