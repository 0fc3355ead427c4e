"""One step: a batch with the policies and settings that act on it, and what a loop is.

The frozen encoders have run once: all loops and rollouts, policy, teacher and reference use their features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.config.rl import Rl
from ans_core.dist import seed_of
from ans_core.model.adapters import Adapters
from ans_core.model.network import Network
from ans_core.rewards import Reward
from ans_core.rl import grpo
from ans_core.rl.batch import EncodedBatch, EncodedImages, RlBatch
from ans_core.rl.experience import Experience
from ans_core.rl.mask_policy import GridGaussian
from ans_core.rl.practice import Practice
from ans_core.rl.rollout import Reader
from ans_core.types import Sample


class StepTimer:
    """Seconds spent in the named parts of a step, and the tokens that were generated in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.generated = 0
        self._open: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.start(name)
        yield
        self.stop(name)

    def start(self, name: str) -> None:
        self._open[name] = self._now()

    def stop(self, name: str) -> None:
        """Add the time since `start`; a part that was not started adds nothing."""
        now = self._now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._open.pop(name, now)

    def metrics(self) -> dict[str, float]:
        spent = {f"rl/seconds/{name}": value for name, value in self.seconds.items()}
        if self.generated and self.seconds.get("generate"):
            spent["rl/generated_tokens_per_s"] = self.generated / self.seconds["generate"]
        return spent

    def clear(self) -> None:
        self.seconds.clear()
        self._open.clear()
        self.generated = 0

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(kw_only=True)
class Exploration:
    """How far loop 2 explores; carried from step to step."""

    width: float
    """Width of the mask policy's distribution, in units of `scale`."""
    scale: float = 0.0
    """Running mean of the policy's `spread`; 0 = not known yet."""
    identical: int = 0
    """Consecutive updates in which no group had two different masks."""


@dataclass(frozen=True, kw_only=True)
class RolloutStep(EncodedBatch):
    """One batch with the policies and settings that act on it."""

    policies: Adapters
    settings: Rl
    reader: Reader
    rewards: Mapping[str, Reward]
    mask_policy: GridGaussian
    exploration: Exploration
    mask_points: int
    """Random points of the supervised mask loss, as in SFT."""
    mask_losses: tuple[float, float]
    """Weights of its BCE and dice."""
    seeds: tuple[object, ...]
    """(run seed, loop, rollout number): with the sample, its repeat and the rollout's index they decide
    everything random."""
    timer: StepTimer
    practice: Practice | None = None
    """What an agent acts in; None for loops that need samples and rewards alone."""
    totals: grpo.Totals = field(default_factory=lambda: grpo.Totals(samples=1.0, answers=1.0, tokens=1.0))
    """Known once all micro-batches of the step have acted."""

    @property
    def model(self) -> Network:
        return self.policies.model

    @property
    def objective(self) -> grpo.Objective:
        s = self.settings
        return grpo.Objective(
            form=s.objective, clip_low=s.clip_low, clip_high=s.clip_high, max_tokens=s.max_tokens
        )

    @staticmethod
    def joined(steps: Sequence[RolloutStep]) -> RolloutStep:
        """Return the steps of several micro-batches of one loop as one, whose samples are theirs in order."""
        if len(steps) == 1:
            return steps[0]
        return replace(
            steps[0],
            batch=RlBatch.joined([step.batch for step in steps]),
            encoded=EncodedImages.joined([step.encoded for step in steps]),
        )

    def take(self, indices: Sequence[int]) -> RolloutStep:
        return replace(self, batch=self.batch.take(indices), encoded=self.encoded.take(indices))

    def seed(self, what: str, sample: int, rollout: int | None = None) -> int:
        chosen, repeat = self.batch.samples[sample], self.batch.repeats[sample]
        return seed_of(
            *self.seeds, what, chosen.dataset, chosen.sample_id, rollout, *([repeat] if repeat else [])
        )

    def generators(self, what: str) -> list[torch.Generator]:
        """Return one generator per sample."""
        return [
            torch.Generator(self.model.device).manual_seed(self.seed(what, i))
            for i in range(len(self.batch.samples))
        ]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A task that the policy practises. A new one is a file with a `Loop` and a line in LOOPS
    (ans_core/rl/dual_loop.py)."""

    prefix: str
    """Prefix of its metrics."""
    takes: Callable[[Sample], bool]
    """The samples it can use."""
    wants: str
    """Those samples in words, for the error when there are none."""
    decodes_masks: bool = False
    """Whether the loop draws masks in its pictures, so that SAM2 must encode them."""
    acts_together: bool = True
    """Whether several micro-batches act as one, which samples their answers at once."""
    rewards: Callable[[Rl], Mapping[Any, float]]
    """Weights of its reward parts."""
    act: Callable[[RolloutStep], Experience]
    """Roll out and reward, under no_grad."""
    judged: Callable[[Rl], bool] = lambda settings: False
    """Whether the judge also scores its captions, in the part `meteor`."""
    read_reference: Callable[[RolloutStep, Experience], None]
    """Compute what the KL needs and keep it in the experience, under no_grad with the reference active."""
    learn: Callable[[RolloutStep, Experience], tuple[Float[Tensor, ""], dict[str, float]]]
    """Return the loss, with a gradient to the policy, and metrics."""
