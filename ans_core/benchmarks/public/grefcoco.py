"""gRefCOCO: expressions that mean one object, several or none -> gIoU, cIoU, N-acc, T-acc, Pr@ as ReLA
computes them. Formats: expressions.py."""

from __future__ import annotations

from ans_core.benchmarks.public import expressions, refcoco
from ans_core.benchmarks.public.asked import Runner
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.referring import ABOVE, Answer, grefcoco


def score(inputs: Inputs) -> Scored:
    outcomes = expressions.read(inputs)
    metrics = grefcoco(outcomes.answers)
    return Scored(
        metrics=metrics
        | {"expressions": len(outcomes.by_id), "without_target": sum(not a.meant for a in outcomes.answers)},
        published={key: percent(value, 2) for key, value in metrics.items()},
        ratios=refcoco.ratios(outcomes.answers, ABOVE) | accuracies(outcomes.answers),
        samples=outcomes.table(),
        missing=outcomes.missing,
        notes=[
            "a missing prediction is wrong also where nothing was meant: it is not taken for an empty mask"
        ]
        if outcomes.missing
        else [],
    )


def accuracies(answers: list[Answer]) -> dict[str, Ratio]:
    """N_acc and T_acc: of the expressions that mean nothing, and of those that mean something."""
    ratios: dict[str, Ratio] = {}
    for name, target in (("N_acc", False), ("T_acc", True)):
        if any(a.meant == target for a in answers):
            right = [int(a.meant == target and a.predicted == target) for a in answers]
            ratios[name] = Ratio(numerators=right, denominators=[int(a.meant == target) for a in answers])
    return ratios


SCORER = Scorer(
    score=score,
    data=refcoco.DATA,
    options=frozenset({"predicted_only", "split"}),
    runner=Runner(
        items=expressions.items,
        record=expressions.record,
        splits=("val", "testA", "testB"),
        running=("IoU", expressions.iou),
    ),
)
