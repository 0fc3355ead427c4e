"""Ref-DAVIS17: J, F, J&F over all (video, expression) pairs, and of each of the four annotations (expression
4k + a of object k is of annotation a). Formats: clips_of_expressions.py."""

from __future__ import annotations

from ans_core.benchmarks.public import clips_of_expressions as video
from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Inputs, Scored

ANNOTATIONS = (
    "annotator1_first_frame",
    "annotator1_full_video",
    "annotator2_first_frame",
    "annotator2_full_video",
)


def score(inputs: Inputs) -> Scored:
    results = video.results(inputs)
    more: dict[str, float] = {}
    if odd := [f"{r.video}/{r.expression}" for r in results if not r.expression.isdecimal()]:
        raise ValueError(
            f"{inputs.data}: expressions {files.shown(odd)} have no number; 4k + a is of object k and "
            "annotation a"
        )
    for a, name in enumerate(ANNOTATIONS):
        if of_one := [r for r in results if int(r.expression) % len(ANNOTATIONS) == a]:
            more |= {f"{key}/{name}": value for key, value in video.figures(of_one).items()}
    return video.scored(
        results,
        more=more,
        notes=["the mean over expressions, as upstream computes it, not by DAVIS' own script over objects"],
    )


SCORER = video.scorer(score, "valid", "val")
