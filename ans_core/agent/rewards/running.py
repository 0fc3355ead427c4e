"""A running mean and spread, for reward parts that vary by degrees.

Rewards of right and wrong are not normalised: while most answers are right, a wrong one would weigh twenty
times as much as a right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

WINDOW = 1000
"""Values, rounded up to whole steps."""
LEAST_SPREAD = 0.05
"""A smaller standard deviation counts as this one: noise is not scaled up."""


def moments(values: Sequence[float]) -> Float[Tensor, " 3"]:
    """Return count, sum and sum of squares, which add up over processes."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return torch.stack(
        [torch.tensor(float(len(tensor)), dtype=tensor.dtype), tensor.sum(), tensor.pow(2).sum()]
    )


@dataclass(frozen=True, kw_only=True)
class RunningNorm:
    """Counts, sums and sums of squares of the last steps' values, oldest first."""

    steps: tuple[tuple[float, float, float], ...] = ()

    def after(self, count: float, total: float, squares: float) -> RunningNorm:
        """Return it with one more step; whole steps are forgotten once the later ones have WINDOW values."""
        steps = (*self.steps, (count, total, squares)) if count else self.steps
        while sum(n for n, _, _ in steps[1:]) >= WINDOW:
            steps = steps[1:]
        return RunningNorm(steps=steps)

    def __call__(self, value: float) -> float:
        """Return (value - mean) / standard deviation; the value itself before the first step."""
        count, total, squares = (sum(step[i] for step in self.steps) for i in range(3))
        if not count:
            return value
        mean = total / count
        spread = max(squares / count - mean**2, 0.0) ** 0.5
        return (value - mean) / max(spread, LEAST_SPREAD)
