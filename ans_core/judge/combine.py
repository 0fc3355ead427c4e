"""METEOR and judgements of groups of captions -> one reward each; the same rule holds for all captions of a
group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

OnFailure = Literal["meteor", "drop"]


def with_judgements(
    meteor: Float[Tensor, "B G"],
    judged: Sequence[float | None],
    *,
    meteor_weight: float,
    judge_weight: float,
    on_failure: OnFailure,
) -> tuple[Float[Tensor, "B G"], float]:
    """Return rewards, and the share of groups that fell back. `judged` is row by row (B * G); the weights are
    scaled to add up to 1.

    If one judgement of a group is missing, the whole group is treated as not judged: rewards of judged and
    unjudged captions would differ by more than their content. "meteor": METEOR alone, at full weight; "drop":
    NaN for the whole group, which leaves it out.
    """
    total = meteor_weight + judge_weight
    if min(meteor_weight, judge_weight) < 0 or total <= 0:
        raise ValueError(
            f"weights of METEOR and judge are {meteor_weight} and {judge_weight}: none below 0, and not "
            "both 0"
        )
    scores = [float("nan") if value is None else value for value in judged]
    judgements = torch.tensor(scores, dtype=meteor.dtype, device=meteor.device).view_as(meteor)
    failed = judgements.isnan().any(1, keepdim=True)  # (B, 1)
    both = (meteor_weight * meteor + judge_weight * judgements) / total
    instead = meteor if on_failure == "meteor" else torch.full_like(meteor, float("nan"))
    return torch.where(failed, instead, both), float(failed.float().mean())
