"""The dual loop's own step, with a KL weight that steers itself: no second trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ans_core.model.adapters import Adapters
from ans_core.online.practice import OnlinePractice
from ans_core.rl import grpo
from ans_core.rl.dual_loop import Batches, DualLoop

LOOP = "agent"


@dataclass(frozen=True, kw_only=True)
class KlControl:
    """beta rises by `factor` while the KL to the reference is above target + tolerance, and falls below
    target - tolerance."""

    target: float = 0.05
    tolerance: float = 0.01
    factor: float = 1.2
    low: float = 1e-4
    high: float = 1.0

    def after(self, beta: float, kl: float) -> float:
        if kl > self.target + self.tolerance:
            return min(self.high, beta * self.factor)
        if kl < self.target - self.tolerance:
            return max(self.low, beta / self.factor)
        return beta

    def too_far(self, kl: float) -> bool:
        """Tell whether an update may only pull back: at twice the target. (Skipping it whole would leave the
        policy there for ever.)"""
        return kl > 2 * self.target


class OnlineLoop(DualLoop):
    """`DualLoop` over adapters policy, teacher and reference. The KL is measured on what was sampled, before
    the policy learns from it."""

    def __init__(
        self, policies: Adapters, *, control: KlControl, practice: OnlinePractice, **options: Any
    ) -> None:
        super().__init__(policies, practice=practice, **options)
        self.control, self.online = control, practice
        self.kl, self.pulled_back = 0.0, False

    def begin_step(self, batches: Sequence[Batches]) -> list[Batches]:
        self.settings = self.settings.model_copy(update={"kl": self.online.progress.beta})
        moved = super().begin_step(batches)
        done = [self.waiting[batch.micro][LOOP] for batch in moved]
        sampled = torch.tensor(
            [p for experience in done for logps in experience.sampled_logps for p in logps]
        )
        references = []
        for experience in done:
            assert experience.reference is not None, "begin_step lets the reference read"
            references.append(experience.reference.cpu())
        self.kl = grpo.token_kl(sampled, torch.cat(references))[1]
        self.pulled_back = self.control.too_far(self.kl)
        if self.pulled_back:
            for experience in done:
                assert experience.advantage is not None, "begin_step sets advantages"
                experience.advantage.zero_()
        self.online.progress.beta = self.control.after(self.online.progress.beta, self.kl)
        return moved

    def after_step(self, step: int) -> dict[str, float]:
        return super().after_step(step) | {
            "online/kl": self.kl,
            "online/pulled_back": float(self.pulled_back),
        }
