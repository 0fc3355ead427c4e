"""Masks as actions: mask logits of the policy -> G masks to try, and the log-probability of a tried one under any later policy.

`grid_gaussian`: the action is a K x K grid of Gaussian numbers around the pooled logits, so that whole parts of a mask grow or shrink. A
mask made from text by one `[SEG]` token has no randomness of its own: its token's log-probability teaches nothing about its shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

TARGET_IOU = (0.75, 0.92)
"""Mean pairwise IoU of a group that sigma is steered to: different enough to learn from, near enough to be masks."""
SIGMA_STEP = 0.05


@dataclass(frozen=True, kw_only=True)
class MaskActions:
    """What was done, kept as it was: a later log-probability never draws anew."""

    grid: Float[Tensor, "B G K K"]
    """The Gaussian actions u."""
    masks: Bool[Tensor, "B G h w"]
    scale: float
    sigma: float


def pooled(logits: Float[Tensor, "B h w"], *, cells: int, scale: float) -> Float[Tensor, "B K K"]:
    """The policy's mean: logits averaged over K x K cells, in units of the logit scale."""
    return F.adaptive_avg_pool2d(logits[:, None], cells)[:, 0] / scale


def act(logits: Float[Tensor, "B h w"], *, group: int, cells: int, sigma: float, scale: float, generator: torch.Generator) -> MaskActions:
    """G noisy versions of every mask: low-frequency Gaussian noise on the logits, thresholded. The detail within a cell is kept."""
    mean = pooled(logits, cells=cells, scale=scale)
    noise = torch.randn((len(logits), group, cells, cells), generator=generator, device=logits.device)
    grid = mean[:, None] + sigma * noise
    change = scale * sigma * F.interpolate(noise, size=logits.shape[-2:], mode="bilinear", align_corners=False)
    return MaskActions(grid=grid, masks=logits[:, None] + change > 0, scale=scale, sigma=sigma)


def log_prob(logits: Float[Tensor, "B h w"], actions: MaskActions) -> Float[Tensor, "B G"]:
    """Gaussian log-density of the actions up to a constant, as mean over the K x K numbers: a sum would make every ratio extreme."""
    mean = pooled(logits, cells=actions.grid.shape[-1], scale=actions.scale)
    return -(actions.grid - mean[:, None]).pow(2).mean((2, 3)) / (2 * actions.sigma**2)


def kl(logits: Float[Tensor, "B h w"], reference: Float[Tensor, "B h w"], actions: MaskActions) -> Float[Tensor, ""]:
    """KL of the two Gaussians, exact, per number of the grid; mean over samples."""
    cells = actions.grid.shape[-1]
    difference = pooled(logits, cells=cells, scale=actions.scale) - pooled(reference, cells=cells, scale=actions.scale)
    return difference.pow(2).mean() / (2 * actions.sigma**2)


def steered(sigma: float, pairwise_iou: float) -> float:
    """The next step's sigma: wider where the group's masks are too alike, narrower where they are too different."""
    low, high = TARGET_IOU
    return sigma * math.exp(SIGMA_STEP * ((pairwise_iou > high) - (pairwise_iou < low)))
