"""Questions with known answers, of the world that the agent was trained in -> whether new weights may be
served."""

from __future__ import annotations

from collections.abc import Sequence
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


def refused(new: Sequence[bool], floor: Sequence[bool], *, allowed: float) -> str | None:
    """Say what new weights lost; None if they may be served: no more than `allowed`, and than chance takes
    (`costs`).

    new: what is right; floor: what the first version has right of the same questions, so that small losses
    can't add up."""
    if not costs(floor, new, allowed):
        return None
    now, was = fmean(new), fmean(floor)
    return f"accuracy on the canary {now:.3f}, {was - now:.3f} below {was:.3f}"
