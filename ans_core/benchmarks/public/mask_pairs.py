"""Pairs of a true and a predicted masklet in one file -> J, F (DAVIS) over all frames, and referring
segmentation's figures on every fifth.

{"height", "width", "frames", "pairs": [{"truth": [RLE or null], "prediction": [RLE or null]}]}
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.referring import Answer, answer, grefcoco, reasonseg
from ans_core.metrics.video import j_and_f, statistics

LEAST = 3
"""Frames: the first and last are also left out of some figures."""
STEP = 5
"""Every fifth frame is an image of its own for the referring figures."""


def score(inputs: Inputs) -> Scored:
    record = files.Record(files.load(inputs.predictions), str(inputs.predictions))
    height, width, count = (int(record.number(name)) for name in ("height", "width", "frames"))
    pairs = record.records("pairs")
    if not pairs or count < LEAST:
        raise ValueError(f"{record.where}: {len(pairs)} pairs of {count} frames; a pair needs {LEAST} frames")
    js, fs, samples, answers = [], [], [], []
    for number, pair in enumerate(pairs):
        truth, predicted = (
            pair.masklet(key, range(count), (height, width)) for key in ("truth", "prediction")
        )
        j, f = zip(*(j_and_f(p, t) for p, t in zip(predicted, truth, strict=True)), strict=True)
        js.append(float(np.mean(j)))
        fs.append(float(np.mean(f)))
        samples.append({"pair": number, **_figures("J", j), **_figures("F", f)})
        answers += [answer(p, t) for p, t in zip(predicted[::STEP], truth[::STEP], strict=True)]
    return _scored(js, fs, samples, answers)


def _scored(js: list[float], fs: list[float], samples: list[dict[str, Any]], answers: list[Answer]) -> Scored:
    j, f = float(np.mean(js)), float(np.mean(fs))
    metrics = {"J&F": (j + f) / 2, "J": j, "F": f, "pairs": len(js)}
    metrics |= {f"grefcoco/{key}": value for key, value in grefcoco(answers).items()}
    metrics |= {f"reasonseg/{key}": value for key, value in reasonseg(answers).items()}
    metrics["images"] = len(answers)
    shown = {key: percent(value, 4) for key, value in metrics.items() if key.startswith("grefcoco/")}
    return Scored(
        metrics=metrics,
        published={key: percent(metrics[key]) for key in ("J&F", "J", "F")} | shown,
        ratios={"J": Ratio(numerators=js), "F": Ratio(numerators=fs)},
        samples=samples,
        notes=[
            f"grefcoco/ and reasonseg/ take every {STEP}th frame of all pairs as an image",
            "J and F count all frames",
        ],
    )


def _figures(name: str, values: tuple[float, ...]) -> dict[str, Any]:
    full, inner = statistics(values), statistics(values[1:-1])
    return {
        name: full.mean,
        f"{name}_recall": full.recall,
        f"{name}_decay": full.decay,
        f"{name}_without_first_and_last": inner.mean,
        f"{name}_per_frame": list(values),
    }


SCORER = Scorer(score=score, sample_id=("pair",))
