"""Masks as actions: the policy's mask logits -> G masks to try, and the log-probability of a tried mask under
any later policy.

A mask that one `[SEG]` token decodes to has no randomness of its own: the token's log-probability teaches
nothing about its shape. So noise is added to its logits. Noise on the `[SEG]` embedding, sampled pixels, the
choice among SAM2's masks and clicks on other things were tried and gained no more (docs/results.md; the code
is in 7316cc4b).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

TARGET_IOU = (0.75, 0.92)
"""Range to which the width steers a group's mean pairwise IoU: masks differ enough to learn from, and are
still plausible."""
WIDTH_STEP = 0.05


@dataclass(frozen=True, kw_only=True)
class MaskActions:
    """Sampled actions, stored so that a later log-probability never samples again."""

    choice: Tensor
    """(B, G, ...) the numbers that were sampled."""
    masks: Bool[Tensor, "B G h w"]
    confidence: Float[Tensor, "B G"]
    """Mean probability that the mask's pixels are foreground, 0.5 to 1; 0 where it is empty."""
    scale: float
    width: float

    def take(self, rows: Tensor) -> MaskActions:
        """Keep these samples."""
        return replace(
            self, choice=self.choice[rows], masks=self.masks[rows], confidence=self.confidence[rows]
        )


@dataclass(frozen=True, kw_only=True)
class MaskSampling:
    """How a policy explores in one step."""

    width: float
    scale: float
    generators: Sequence[torch.Generator]
    """One per sample."""
    group: int

    def normal(self, *shape: int) -> Float[Tensor, "B G *shape"]:
        """Return normal noise from the samples' generators."""
        return torch.stack(
            [torch.randn((self.group, *shape), generator=g, device=g.device) for g in self.generators]
        )

    def actions(self, choice: Tensor, logits: Float[Tensor, "B G h w"]) -> MaskActions:
        masks = logits > 0
        confidence = mean_probability(logits.sigmoid(), masks)
        return MaskActions(
            choice=choice, masks=masks, confidence=confidence, scale=self.scale, width=self.width
        )


def mean_probability(p: Float[Tensor, "*P h w"], masks: Bool[Tensor, "*P h w"]) -> Float[Tensor, "*P"]:
    """Return the mean probability of the pixels in a mask; 0 for an empty mask."""
    return torch.where(masks, p, 0.0).sum((-2, -1)) / masks.sum((-2, -1)).clamp(min=1)


@dataclass(frozen=True)
class GridGaussian:
    """The action is a grid of cells x cells around the pooled logits of the mask with the best predicted IoU,
    so that whole parts of a mask grow or shrink; detail within a cell is kept. The gradient reaches everything
    that draws, including SAM2's mask decoder."""

    cells: int

    def mean(self, logits: Float[Tensor, "B h w"]) -> Float[Tensor, "B K K"]:
        """Return the mean of the action, which the gradient reaches."""
        return F.adaptive_avg_pool2d(logits[:, None], self.cells)[:, 0]

    def spread(self, logits: Float[Tensor, "B h w"]) -> float:
        """Return the unit in which the width is measured: a mean over samples."""
        return float(logits.flatten(1).std(1).mean())

    def act(self, logits: Float[Tensor, "B h w"], sampling: MaskSampling) -> MaskActions:
        """Sample G masks for each sample, with the sample's generator."""
        noise = sampling.normal(self.cells, self.cells)
        change = (
            sampling.scale
            * sampling.width
            * F.interpolate(noise, size=logits.shape[-2:], mode="bilinear", align_corners=False)
        )
        choice = self.mean(logits)[:, None] / sampling.scale + sampling.width * noise
        return sampling.actions(choice, logits[:, None] + change)

    def log_prob(self, logits: Float[Tensor, "B h w"], actions: MaskActions) -> Float[Tensor, "B G"]:
        """Return the log-probability of the stored actions, up to a constant, as the mean over an action's
        numbers: a sum would make every ratio extreme."""
        mean = self.mean(logits) / actions.scale
        return -(actions.choice - mean[:, None]).pow(2).flatten(2).mean(2) / (2 * actions.width**2)

    def kl(
        self, logits: Float[Tensor, "B h w"], reference: Float[Tensor, "B h w"], actions: MaskActions
    ) -> Float[Tensor, ""]:
        """Return the exact KL(policy || reference) of the action distributions, per number, averaged over
        samples."""
        difference = (self.mean(logits) - self.mean(reference)) / actions.scale
        return difference.pow(2).mean() / (2 * actions.width**2)


def steered(width: float, pairwise_iou: float) -> float:
    """Return the next step's width: wider if the group's masks are too alike, narrower if they are too
    different."""
    low, high = TARGET_IOU
    return width * math.exp(WIDTH_STEP * ((pairwise_iou > high) - (pairwise_iou < low)))
