"""How long the demo's stages take, for a machine that has not run them yet."""

from __future__ import annotations

from collections.abc import Mapping

USUAL_S: dict[str, dict[str, float]] = {
    "quick": {
        "prepare": 71, "base": 262, "memory": 97, "sft": 166, "judge_questions": 19, "rl": 114, "convert": 17,
        "evaluate@untrained": 43, "evaluate@base": 32, "evaluate@sft": 36, "evaluate@rl": 36, "report": 25,
    },
}  # fmt: skip
"""Profile -> stage -> seconds on two idle cores of an AMD EPYC with AVX2 alone, in fp32 (2026-11-27)."""
USUAL_PRODUCT_MS = 7.5
"""`precision.fp32_ms` of that machine with two threads."""


def left_s(profile: str, done: Mapping[str, float], names: list[str]) -> float | None:
    """Return the seconds that stages `names` will take here, from what stages took that are done in this run;
    None where nothing is known."""
    usual = USUAL_S.get(profile, {})
    expected = sum(usual.get(name, 0.0) for name in done)
    if not expected or not usual.keys() >= set(names):
        return None
    return (
        sum(usual[name] for name in names)
        * sum(seconds for name, seconds in done.items() if name in usual)
        / expected
    )


def demo_minutes(product_ms: float) -> float:
    """Return the minutes of the demo, in fp32, on a machine whose `precision.fp32_ms` is this."""
    return sum(USUAL_S["quick"].values()) / 60 * product_ms / USUAL_PRODUCT_MS
