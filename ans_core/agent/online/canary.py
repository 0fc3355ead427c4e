"""Questions with known answers -> whether new weights may be served: those the agent came with (source), and new ones whose label an
independent path confirmed, which were kept apart (target)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ans_core.agent.crops import CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import lost
from ans_core.agent.online.voting import normal
from ans_core.agent.play import Limits, play
from ans_core.model.adapters import Adapters
from ans_core.types import Request

Asked = tuple[Request, str]
"""A question and its answer."""
CHANCE = 1.64
"""Standard errors of a paired difference: chance alone goes so far down once in twenty."""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """Measures an adapter greedily."""

    adapters: Adapters
    toolbox: Toolbox
    limits: Limits
    features: CropFeatures
    batch: int

    def right(self, adapter: str, asked: Sequence[Asked]) -> list[bool]:
        """Tell of each question whether its answer is right."""
        with self.adapters.using(adapter):
            played = play(
                self.adapters.model,
                self.toolbox,
                [request for request, _ in asked],
                limits=self.limits,
                features=self.features,
                batch=self.batch,
            )
        return [own.answer is not None and normal(own.answer) == normal(answer) for own, (_, answer) in zip(played, asked, strict=True)]


def refused(new: Mapping[str, Sequence[bool]], floor: Mapping[str, Sequence[bool]], *, allowed: float) -> str | None:
    """Say what new weights lost; None if they may be served: they lost no more than `allowed`, or than chance takes from as good ones.

    new, floor: what is right of the same questions; floor: by the first version on `source`, so that small losses can't add up, and by the
    served one on `target`."""
    for name, before in floor.items():
        if not before:
            continue
        loss, error = lost(before, new[name])
        if loss > max(allowed, CHANCE * error):
            return f"accuracy on the {name} canary {fmean(new[name]):.3f}, {loss:.3f} below {fmean(before):.3f}"
    return None
