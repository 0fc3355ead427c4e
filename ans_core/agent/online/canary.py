"""Questions with known answers -> whether new weights may be served: those the agent came with (source), and new ones whose label an
independent path confirmed, which were kept apart (target)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ans_core.agent.crops import CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.online.voting import normal
from ans_core.agent.play import Limits, play
from ans_core.model.adapters import Adapters
from ans_core.types import Request

Asked = tuple[Request, str]
"""A question and its answer."""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """Measures an adapter greedily."""

    adapters: Adapters
    toolbox: Toolbox
    limits: Limits
    features: CropFeatures
    batch: int

    def accuracy(self, adapter: str, asked: Sequence[Asked]) -> float | None:
        """Return the share of right answers; None without questions."""
        if not asked:
            return None
        with self.adapters.using(adapter):
            played = play(
                self.adapters.model,
                self.toolbox,
                [request for request, _ in asked],
                limits=self.limits,
                features=self.features,
                batch=self.batch,
            )
        right = [own.answer is not None and normal(own.answer) == normal(answer) for own, (_, answer) in zip(played, asked, strict=True)]
        return sum(right) / len(right)


def refused(new: Mapping[str, float], floor: Mapping[str, float], *, allowed: float) -> str | None:
    """Say what new weights lost; None if they may be served. floor: the first version's accuracy on `source`, so that small losses can't
    add up, and the served one's on `target`."""
    for name, least in floor.items():
        if name in new and new[name] < least - allowed:
            return f"accuracy on the {name} canary {new[name]:.3f}, {least - new[name]:.3f} below {least:.3f}"
    return None
