"""Curiosity about operations (Pixel-Reasoner, arXiv 2505.15966): a bonus for calling while few episodes do,
and a price for calls beyond the shortest plan's.

A group that calls nowhere earns no bonus, so a share is kept over the run, for every family of questions by
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9
"""Of the counts, per step."""
WANTED = 0.3
"""H: share of a family's episodes that should call with success, where a question needs it."""
ALPHA = 0.5
BETA = 0.05


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """A family's episodes with a successful call and without: decaying counts."""

    with_call: float = 0.0
    without: float = 0.0

    @property
    def rapr(self) -> float:
        """Rate of pixel-space reasoning: the share of episodes with a successful call; 0 before the first."""
        return self.with_call / max(self.with_call + self.without, 1e-9)

    def after(self, counts: ToolUse) -> ToolUse:
        """Return what is known after a step with these counts; without episodes of the family nothing
        changes."""
        if not counts.with_call + counts.without:
            return self
        return ToolUse(
            with_call=DECAY * self.with_call + counts.with_call, without=DECAY * self.without + counts.without
        )


def bonus(*, successful: int, shortest: int, use: ToolUse) -> float:
    """Return alpha * max(H - RaPR, 0) for an episode with a successful call. H is 0 where the shortest plan
    has no call."""
    if not successful or not shortest:
        return 0.0
    return ALPHA * max(WANTED - use.rapr, 0.0)


def price(*, calls: int, shortest: int) -> float:
    """Return beta * min(N - n, 0): n calls were made, the shortest plan has N."""
    return BETA * min(shortest - calls, 0)
