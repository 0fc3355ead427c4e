"""What a worker knows of itself -> sentences for people, where something goes wrong that no exception
tells."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_ADMITTED, MOST_FLIPS, MOST_ONE_LABEL = 0.1, 0.2, 0.8


def alerts(
    metrics: Mapping[str, float], counts: Mapping[str, int], before: Mapping[str, int]
) -> dict[str, str]:
    """Return kind -> sentence. metrics: of the practice; counts, before: of the store, now and at the last
    look."""
    sentences = {}
    if metrics["online/recently_admitted"] < LEAST_ADMITTED:
        sentences["few_admitted"] = (
            f"{metrics['online/recently_admitted']:.0%} of the last tasks pass the gate: nearly nothing is "
            "learned"
        )
    if metrics["online/flip_rate"] > MOST_FLIPS:
        sentences["flips"] = (
            f"{metrics['online/flip_rate']:.0%} of the labels change between visits: an early sign of "
            "collapse"
        )
    if metrics["online/largest_label"] > MOST_ONE_LABEL:
        sentences["one_label"] = (
            f"one label has {metrics['online/largest_label']:.0%} of what is learned: the policy may answer "
            "it always"
        )
    if metrics.get("online/pulled_back"):
        sentences["far_away"] = (
            f"KL {metrics['online/kl']:.3g} to the reference is above twice its target: updates only pull "
            "back"
        )
    if (more := counts.get("flooded", 0) - before.get("flooded", 0)) > 0:
        sentences["flooded"] = (
            f"{more} experiences were not kept, because the queue was full: more of them come than the "
            "worker learns from"
        )
    return sentences
