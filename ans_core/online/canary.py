"""Questions with known answers, of the world that the agent was trained in -> whether new weights may be
served."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ans_core.agent.evaluation import costs
from ans_core.agent.play import PlayedEpisode
from ans_core.agent.world.question import same_answer


def right(played: Sequence[PlayedEpisode], answers: Sequence[str]) -> list[bool]:
    """Tell of each question whether its answer is right."""
    return [
        episode.answer is not None and same_answer(episode.answer, answer)
        for episode, answer in zip(played, answers, strict=True)
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
