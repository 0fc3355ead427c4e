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
from ans_core.types import RLE

STEP = 5
"""Every fifth frame is an image of its own for the referring figures."""


def score(inputs: Inputs) -> Scored:
    loaded = files.load(inputs.predictions)
    where = str(inputs.predictions)
    pairs = files.listed(loaded, "pairs", where=where, of=dict)
    if not pairs:
        raise ValueError(f"{where}: no pairs")
    js, fs, samples, answers = [], [], [], []
    for number, pair in enumerate(pairs):
        truth, predicted = (
            _masklet(loaded, pair, key, where=f"{where}, pair {number}") for key in ("truth", "prediction")
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
    metrics |= {f"reasonseg/{key}": value for key, value in reasonseg(answers).items()} | {
        "images": len(answers)
    }
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


def _masklet(record: dict[str, Any], pair: dict[str, Any], key: str, *, where: str) -> list[RLE]:
    listed = files.listed(pair, key, where=where)
    height, width, frames = (
        int(files.number(record, name, where=where)) for name in ("height", "width", "frames")
    )
    if len(listed) != frames or len(listed) < 3:
        raise ValueError(f"{where}: {len(listed)} masks of {key}, {frames} frames")
    return [
        files.mask(m, height=height, width=width, where=f"{where}, {key}, frame {t}")
        for t, m in enumerate(listed)
    ]


SCORER = Scorer(score=score, data="", needs_data=False, sample_id=("pair",))
