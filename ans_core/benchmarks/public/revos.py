"""ReVOS: J, F, J&F, accuracy A and robustness R for referring and reasoning expressions and overall (the mean
of the two). Formats: clips_of_expressions.py, and mask_dict_foreground.json {video: {"masks_rle": [RLE or
null per frame]}} for R.

Expressions of type 2 (no such object) are left out, as in the public scorer. It adds overlapping objects up
(2 for a pixel of two), which breaks A and R there; here they are united.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ans_core.benchmarks.public import clips_of_expressions as video
from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Inputs, Scored
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.mask import counts
from ans_core.pictures import rle

TYPES = {0: "referring", 1: "reasoning"}
FOREGROUND = "mask_dict_foreground.json"


def score(inputs: Inputs) -> Scored:
    path = files.named(inputs.truth, FOREGROUND)
    foreground = files.Record(files.load(path), str(path))
    groups: dict[str, list[tuple[video.Result, float, float]]] = {name: [] for name in TYPES.values()}
    for clip in video.clips(inputs):
        kind = clip.record.value("type_id")
        if isinstance(kind, int) and kind in TYPES:
            groups[TYPES[kind]].append((video.result(clip), *accuracy_and_robustness(clip, foreground)))
    if empty := [name for name, of_type in groups.items() if not of_type]:
        raise ValueError(
            f"{inputs.truth}: no expression of type {' or '.join(empty)}; the overall figures are the mean of "
            "both types"
        )
    metrics: dict[str, float] = {}
    rounded: dict[str, dict[str, float]] = {}
    for name, of_type in groups.items():
        columns = {
            "J": [r.j for r, _, _ in of_type],
            "F": [r.f for r, _, _ in of_type],
            "A": [a for _, a, _ in of_type],
            "R": [b for _, _, b in of_type],
        }
        means = {key: float(np.mean(values)) for key, values in columns.items()}
        rounded[name] = {
            key: float(np.mean([round(100 * v, 2) for v in values])) for key, values in columns.items()
        }
        metrics |= {f"{name}/{key}": value for key, value in _with_both(means).items()} | {
            f"{name}/expressions": len(of_type)
        }
    for key in ("J&F", "J", "F", "A", "R"):
        metrics[f"overall/{key}"] = (metrics[f"referring/{key}"] + metrics[f"reasoning/{key}"]) / 2
    overall = {key: (rounded["referring"][key] + rounded["reasoning"][key]) / 2 for key in "JFAR"}
    shown = {
        f"{name}/{key}": f"{v:.1f}"
        for name, values in (rounded | {"overall": overall}).items()
        for key, v in _with_both(values).items()
    }
    base = video.scored(
        [r for of_type in groups.values() for r, _, _ in of_type],
        notes=["overall: the mean of the two types"],
    )
    kinds = [name for name, of_type in groups.items() for _ in of_type]
    # the mean of the two types' means: every expression weighs 1 / the number of its type
    weights_of = {"overall": [1 / len(groups[kind]) for kind in kinds]}
    weights_of |= {name: [float(kind == name) for kind in kinds] for name in groups}
    ratios = {}
    for name, weights in weights_of.items():
        for key, ratio in base.ratios.items():
            weighted = [w * v for w, v in zip(weights, ratio.numerators, strict=True)]
            ratios[f"{name}/{key}"] = Ratio(numerators=weighted, denominators=weights)
    together = tuple(f"overall/{key}" for key in base.ratios)
    return replace(base, metrics=metrics, published=shown, ratios=ratios, scored_together=together)


def _with_both(means: dict[str, float]) -> dict[str, float]:
    return {"J&F": (means["J"] + means["F"]) / 2, **means}


def accuracy_and_robustness(clip: video.Clip, foreground: files.Record) -> tuple[float, float]:
    """A: share of pixels that agree. R: 1 - predicted pixels outside the truth / pixels of any object, not
    below 0. Means over frames."""
    if clip.prediction is None:
        return 0.0, 0.0
    height, width = clip.truth[0]["size"]
    objects = foreground.record(clip.video).masklet("masks_rle", range(len(clip.truth)), (height, width))
    accuracies, robust = [], []
    for predicted, real, around in zip(clip.prediction, clip.truth, objects, strict=True):
        pixels = counts(predicted, real)
        accuracies.append(1 - (pixels.union - pixels.intersection) / (height * width))
        outside = rle.area(predicted) - pixels.intersection
        robust.append(max(1 - outside / (rle.area(around) + 1e-6), 0.0))
    return float(np.mean(accuracies)), float(np.mean(robust))


def question(expression: str) -> str:
    """Upstream's: a question of the reasoning part is asked as it is."""
    return (
        f"<image>\n {expression} Please respond with a segmentation mask."
        if "?" in expression
        else video.QUESTION.format(expression)
    )


SCORER = video.scorer(
    score,
    "valid",
    data=f"{video.DATA}, {FOREGROUND}",
    question=question,
    needs=lambda truth, split: files.named(truth, FOREGROUND),
)
