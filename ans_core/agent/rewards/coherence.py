"""Whether an episode's calls follow from each other, by rules on pairs of neighbours; the answer counts as
the last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ans_core.agent.episode import Observation
from ans_core.agent.protocol import Call

ANSWER = "answer"
GOOD = {
    ("segment_object_at", "get_properties"),
    ("segment_object_at", "track_object"),
    ("zoom_in", "read_text"),
    ("read_text", ANSWER),
    ("get_properties", ANSWER),
}
BAD = {("track_object", "track_object"), ("zoom_in", "zoom_in"), ("get_properties", "segment_object_at")}
REPEATED, LEADS_ON, LEADS_NOWHERE = -0.5, 0.2, -0.3


@dataclass(frozen=True)
class _Step:
    """A turn: the call (None for a malformed one), and whether it worked."""

    call: Call | None
    ok: bool


def coherence(observations: Sequence[Observation], *, plan: Sequence[Call]) -> float:
    """Return the mean score of neighbouring steps, 0 for an answer at once: an exact repetition costs, then
    good and bad pairs count. A pair is good only if its calls worked. Turns without a well-formed call are
    neither.

    At most what the shortest plan has: good pairs that a question does not need would otherwise pay for calls
    that it does not need."""
    best = _mean([_Step(call, True) for call in plan])
    return min(best, _mean([_Step(observation.call, observation.ok) for observation in observations]))


def _mean(steps: Sequence[_Step]) -> float:
    if not steps:
        return 0.0
    return sum(_score(*pair) for pair in zip(steps, [*steps[1:], None], strict=True)) / len(steps)


def _score(first: _Step, second: _Step | None) -> float:
    if first.call is None or (second is not None and second.call is None):
        return 0.0
    if second is not None and first.call == second.call:
        return REPEATED
    names = (first.call.name, ANSWER if second is None or second.call is None else second.call.name)
    if names in GOOD and first.ok and (second is None or second.ok):
        return LEADS_ON
    return LEADS_NOWHERE if names in BAD else 0.0
