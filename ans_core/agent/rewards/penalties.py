"""What an episode did that makes no sense, whatever it answered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ans_core.agent.episode import Observation

UNIT = 0.1
NEEDS_A_MASK = ("get_properties", "track_object")
GIVES_A_MASK = ("segment_object_at", "locate")
MOST = {"zoom_in": 3, "track_object": 5, "segment_object_at": 10, "get_properties": 10, "read_text": 15}
"""Calls of one operation; each beyond is over-use."""


def penalties(observations: Sequence[Observation], *, answer: str | None) -> dict[str, float]:
    """Return penalties (0 or negative) by name: `prerequisite`, a mask asked about before one was made;
    `still`, twice as much for following something in a picture; `out_of_bounds`, half as much for a box that
    is none; `over_use`; `no_answer`."""
    counts: defaultdict[str, float] = defaultdict(float)
    used: Counter[str] = Counter()
    masks = False
    for observation in observations:
        name = observation.call.name if observation.call is not None else ""
        used[name] += 1
        counts["prerequisite"] += name in NEEDS_A_MASK and not masks
        counts["still"] += 2 * (observation.error == "not_a_clip")
        counts["out_of_bounds"] += 0.5 * (observation.error == "bad_box")
        counts["over_use"] += used[name] > MOST.get(name, len(observations))
        masks = masks or (name in GIVES_A_MASK and observation.ok)
    counts["no_answer"] += not (answer or "").strip()
    return {name: -UNIT * count for name, count in counts.items()}
