"""Judge the captions of a step with questions about the true captions, and mix the judgements with METEOR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.judge.base import Judge
from ans_core.judge.questions import Questions
from ans_core.types import Sample

OnFailure = Literal["meteor", "drop"]


@dataclass(frozen=True, kw_only=True)
class Judging:
    judge: Judge
    questions: Mapping[tuple[str, str], Questions]
    """By (data set, sample_id)."""
    meteor_weight: float
    judge_weight: float
    on_failure: OnFailure

    def submit(self, samples: Sequence[Sample], texts: Sequence[str]) -> Future[list[float | None]]:
        """Submit G captions per sample to the judge; return at once."""
        group = len(texts) // len(samples)
        pairs = [
            (text, self.questions[s.dataset, s.sample_id])
            for i, s in enumerate(samples)
            for text in texts[i * group : (i + 1) * group]
        ]
        return self.judge.submit(pairs)

    def rewards_with_judge(
        self, meteor: Float[Tensor, "B G"], judged: Sequence[float | None]
    ) -> tuple[Float[Tensor, "B G"], dict[str, float]]:
        """Return the reward that replaces METEOR's, and metrics. `judged` is row by row (B * G); the weights are
        scaled to add up to 1.

        If one judgement of a group is missing, the whole group is treated as not judged: rewards of judged and
        unjudged captions would differ by more than their content. "meteor": METEOR alone, at full weight;
        "drop": NaN for the whole group, which leaves it out.
        """
        total = self.meteor_weight + self.judge_weight
        if min(self.meteor_weight, self.judge_weight) < 0 or total <= 0:
            raise ValueError(
                f"weights of METEOR and judge are {self.meteor_weight} and {self.judge_weight}: none below 0, "
                "and not both 0"
            )
        scores = [float("nan") if value is None else value for value in judged]
        judgements = torch.tensor(scores, dtype=meteor.dtype, device=meteor.device).view_as(meteor)
        failed = judgements.isnan().any(1, keepdim=True)  # (B, 1)
        both = (self.meteor_weight * meteor + self.judge_weight * judgements) / total
        instead = meteor if self.on_failure == "meteor" else torch.full_like(meteor, float("nan"))
        metrics = {
            "reward/meteor_alone": float(meteor.mean()),
            "judge/fell_back": float(failed.float().mean()),
        }
        if present := [value for value in judged if value is not None]:
            metrics["reward/judge"] = sum(present) / len(present)
        return torch.where(failed, instead, both), metrics
