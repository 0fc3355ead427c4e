"""What an agent acts in, as its loop sees it. Questions, operations and their rewards are of
`ans_core.agent`, a layer above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ans_core.model.backbones.base import ImageFeatures
from ans_core.rl.grpo import Total
from ans_core.rl.rollout import Rollout
from ans_core.types import ImageRef

if TYPE_CHECKING:
    from ans_core.rl.batch import Box, FramePart
    from ans_core.rl.step import RolloutStep


@dataclass(frozen=True, kw_only=True)
class PlayedRollout:
    """One episode: what was read and said, and what it earned."""

    prefix: tuple[int, ...]
    """Picture and question, but for the last token; the same for all rollouts of a sample."""
    rollout: Rollout
    """Everything after the prefix; trainable is what the policy said."""
    logps: tuple[float, ...]
    """Log-probabilities of the trainable tokens, as they were sampled."""
    observed: tuple[FramePart, ...]
    """The pictures that came back, in the order of the text."""
    text: str
    """The episode for people: turns and observations."""
    rewards: dict[str, float]
    """Reward parts; NaN for an episode that is no lesson (over-turn): it is left out of its group's baseline
    and gets advantage 0."""
    measured: dict[str, float]
    """Further numbers of the episode; their means go to the metrics. An episode that lacks one is left out of
    its mean."""


@runtime_checkable
class Practice(Protocol):
    """Plays episodes and keeps from step to step what their rewards depend on; it is saved with every
    training state."""

    def play(self, step: RolloutStep) -> list[PlayedRollout]:
        """Play G episodes about each of the step's samples."""
        ...

    def encode(self, parts: Sequence[tuple[ImageRef, Box]]) -> list[ImageFeatures]:
        """Return the frozen vision tower's features of boxes of frames: of the same part the same bits each
        time."""
        ...

    def end_rollouts(self, total: Total) -> None:
        """Take what all micro-batches of this step did into account, with the sum over all processes."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of what is kept."""
        ...

    def state(self) -> dict[str, Any]:
        """Return plain containers and tensors for a checkpoint."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...
