"""Ref-YouTube-VOS: J, F, J&F over expressions, of masks in MeViS' layout (the valid split's are on the server
alone). Formats: clips_of_expressions.py."""

from __future__ import annotations

from ans_core.benchmarks.public import clips_of_expressions
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer


def score(inputs: Inputs) -> Scored:
    return clips_of_expressions.scored(clips_of_expressions.results(inputs), notes=[])


SCORER = Scorer(
    score=score,
    data=clips_of_expressions.DATA,
    options=frozenset({"predicted_only"}),
    sample_id=clips_of_expressions.SAMPLE_ID,
    runner=clips_of_expressions.runner("valid", "test"),
)
