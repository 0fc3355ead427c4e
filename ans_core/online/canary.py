"""Questions with known answers -> whether new weights may be served: those the agent came with (source), and
new ones whose label an independent path confirmed, which were kept apart (target)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ans_core.agent.crops import CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import costs
from ans_core.agent.play import Limits, play
from ans_core.model.adapters import Adapters
from ans_core.online.voting import normal
from ans_core.types import Request

LabelledRequest = tuple[Request, str]
"""A question and its answer."""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """Measures an adapter greedily."""

    adapters: Adapters
    toolbox: Toolbox
    limits: Limits
    features: CropFeatures
    batch: int

    def right(self, adapter: str, requests: Sequence[LabelledRequest]) -> list[bool]:
        """Tell of each question whether its answer is right."""
        with self.adapters.using(adapter):
            played = play(
                self.adapters.model,
                self.toolbox,
                [request for request, _ in requests],
                limits=self.limits,
                features=self.features,
                batch=self.batch,
            )
        return [
            episode.answer is not None and normal(episode.answer) == normal(answer)
            for episode, (_, answer) in zip(played, requests, strict=True)
        ]


def refused(
    new: Mapping[str, Sequence[bool]], floor: Mapping[str, Sequence[bool]], *, allowed: float
) -> str | None:
    """Say what new weights lost; None if they may be served: on neither canary more than `allowed`, and than
    chance takes (`costs`).

    new, floor: what is right of the same questions; floor: by the first version on `source`, so that small
    losses can't add up, and by the served one on `target`."""
    for name, before in floor.items():
        if costs(before, new[name], allowed):
            now, was = fmean(new[name]), fmean(before)
            return f"accuracy on the {name} canary {now:.3f}, {was - now:.3f} below {was:.3f}"
    return None
