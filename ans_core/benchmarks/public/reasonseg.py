"""ReasonSeg: a mask a question -> gIoU, cIoU as LISA computes them, and P@0.5 to 0.9. Formats: expressions.py.

The true masks come as run-length code: ReasonSeg's own polygons must be filled by OpenCV to give the benchmark's pixels.
"""

from __future__ import annotations

from ans_core.benchmarks.public import expressions, refcoco
from ans_core.benchmarks.public.scored import Given, Scored, Scorer, percent
from ans_core.metrics.referring import reasonseg, shares_above


def score(given: Given) -> Scored:
    found = expressions.read(given)
    metrics = reasonseg(found.answers) | shares_above(found.answers, refcoco.THRESHOLDS)
    return Scored(
        metrics=metrics | {"questions": len(found.ids)},
        published={key: percent(metrics[key]) for key in ("gIoU", "cIoU")},
        ratios=refcoco.ratios(found.answers),
        samples=found.table(),
        missing=found.missing,
    )


SCORER = Scorer(score=score, data="records of true masks")
