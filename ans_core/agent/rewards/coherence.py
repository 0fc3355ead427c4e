"""Whether an episode's calls follow from each other, by rules on pairs of neighbours; the answer counts as the last step."""

from __future__ import annotations

from collections.abc import Sequence

from ans_core.agent.episode import Observation

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


def coherence(observations: Sequence[Observation]) -> float:
    """Return the mean score of neighbouring steps, 0 for an answer at once: an exact repetition costs, then good and bad pairs count. A
    pair is good only if its calls worked. Turns without a well-formed call are neither."""
    if not observations:
        return 0.0
    return sum(_score(*pair) for pair in zip(observations, [*observations[1:], None], strict=True)) / len(observations)


def _score(first: Observation, second: Observation | None) -> float:
    if first.call is None or (second is not None and second.call is None):
        return 0.0
    if second is not None and first.call == second.call:
        return REPEATED
    names = (first.call.name, ANSWER if second is None or second.call is None else second.call.name)
    if names in GOOD and first.ok and (second is None or second.ok):
        return LEADS_ON
    return LEADS_NOWHERE if names in BAD else 0.0
