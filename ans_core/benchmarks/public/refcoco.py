"""RefCOCO, RefCOCO+, RefCOCOg: a mask an expression -> cIoU, gIoU, P@0.5 to 0.9. Formats: expressions.py.

No mask is a miss: IoU 0, its true pixels in cIoU's union. Upstream leaves such expressions out of cIoU's
sums; that optimistic number is `cIoU_upstream`.
"""

from __future__ import annotations

from functools import partial

from ans_core.benchmarks.public import expressions
from ans_core.benchmarks.public.asked import Runner
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.mask import Counts, ciou, giou
from ans_core.metrics.referring import Answer, shares_above

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
DATA = "records of true masks, or REFER's folder with refs(...).p and instances.json"


def score(inputs: Inputs) -> Scored:
    outcomes = expressions.read(inputs, single=True)
    answers = outcomes.answers
    metrics = {"cIoU": ciou(a.counts for a in answers), "gIoU": giou(a.counts for a in answers)}
    metrics |= shares_above(answers, THRESHOLDS)
    intervals, notes = ratios(answers), []
    if answered := [a.counts for a in answers if a.answered]:
        metrics["cIoU_upstream"] = ciou(answered)
        intervals["cIoU_upstream"] = _pooled([a.counts if a.answered else Counts() for a in answers])
        notes = ["cIoU_upstream leaves out expressions that got no mask, as upstream's scorer does"]
    return Scored(
        metrics=metrics | {"expressions": len(answers), "without_a_mask": len(answers) - len(answered)},
        published={key: percent(metrics[key]) for key in ("cIoU", "gIoU")},
        ratios=intervals,
        samples=outcomes.table(),
        missing=outcomes.missing,
        notes=notes,
    )


def _pooled(pixels: list[Counts]) -> Ratio:
    return Ratio(numerators=[c.intersection for c in pixels], denominators=[c.union for c in pixels])


def ratios(answers: list[Answer], thresholds: tuple[float, ...] = THRESHOLDS) -> dict[str, Ratio]:
    pixels, meant = [a.counts for a in answers], [int(a.meant) for a in answers]
    ratio_of = {"cIoU": _pooled(pixels), "gIoU": Ratio(numerators=[c.iou for c in pixels])}
    if any(meant):
        ratio_of |= {
            f"P@{t:g}": Ratio(
                numerators=[int(a.meant and a.counts.iou >= t) for a in answers], denominators=meant
            )
            for t in thresholds
        }
    return ratio_of


SCORER = Scorer(
    score=score,
    data=DATA,
    options=frozenset({"predicted_only", "split"}),
    runner=Runner(
        items=partial(expressions.items, single=True),
        record=expressions.record,
        splits=("val", "testA", "testB", "test"),
        running=("IoU", expressions.iou),
    ),
)
