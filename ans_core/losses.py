"""Logits and targets -> scalar losses, as the Sa2VA family defines them (upstream's mmdet losses; parity is
tested on golden values)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ans_core.metrics.mask import mask_iou


def text_loss(logits: Float[Tensor, "M V"], target: Int[Tensor, " M"]) -> Float[Tensor, ""]:
    """Return cross-entropy in fp32, mean over the M learned tokens of the batch; 0 without any."""
    return F.cross_entropy(logits.float(), target) if len(target) else logits.float().sum()


def point_sample(maps: Float[Tensor, "N H W"], points: Float[Tensor, "N P 2"]) -> Float[Tensor, "N P"]:
    """Sample maps bilinearly at points (x, y) in [0, 1]; corners not aligned, zero outside."""
    return F.grid_sample(
        maps[:, None], 2 * points[:, :, None] - 1, mode="bilinear", padding_mode="zeros", align_corners=False
    )[:, 0, :, 0]


@torch.no_grad()
def uncertain_points(
    logits: Float[Tensor, "N H W"],
    *,
    points: int,
    seeds: Sequence[int] | None = None,
    oversample: float = 3.0,
    importance: float = 0.75,
) -> Float[Tensor, "N P 2"]:
    """Sample points as Mask2Former does: from oversample * points uniform points, keep the share `importance`
    of `points` nearest to logit 0; the rest are uniform.

    `seeds`: one per mask, so that a mask's points do not depend on the rest of the batch; None = torch's
    global generator.
    """
    count, generators = (
        len(logits),
        [torch.Generator(logits.device).manual_seed(seed) for seed in seeds or ()],
    )

    def uniform(number: int) -> Float[Tensor, "N K 2"]:
        if seeds is None:
            return torch.rand(count, number, 2, device=logits.device)
        return torch.stack(
            [torch.rand(number, 2, device=logits.device, generator=generator) for generator in generators]
        )

    candidates = uniform(int(points * oversample))
    uncertainty = -point_sample(logits.float(), candidates).abs()
    chosen = int(importance * points)
    best = uncertainty.topk(chosen, dim=1).indices
    selected = candidates.gather(1, best[:, :, None].expand(-1, -1, 2))
    return torch.cat([selected, uniform(points - chosen)], dim=1)


def mask_losses(
    logits: Float[Tensor, "N H W"],
    targets: Bool[Tensor, "N S T"],
    *,
    points: int,
    seeds: Sequence[int] | None = None,
    total: float | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute (BCE, dice) at the same `points` sampled points per mask; sums over masks divided by `total`,
    weights not applied. N >= 1. 0 points: at every pixel of the targets."""
    logits = logits.float()
    if not points:
        wide = F.interpolate(logits[:, None], size=targets.shape[-2:], mode="bilinear")[:, 0]
        return point_losses(wide.flatten(1), targets.flatten(1).float(), total=total)
    where = uncertain_points(logits, points=points, seeds=seeds)
    return point_losses(point_sample(logits, where), point_sample(targets.float(), where), total=total)


def point_losses(
    logits: Float[Tensor, "N P"], target: Float[Tensor, "N P"], *, total: float | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute upstream's two mask losses before their weights (2.0 and 0.5): its averaging factors N*P and N
    carry +1e-4.

    `total` replaces N if these masks are only a part of a step's: the parts then add up to the step's loss.
    None = N.
    """
    count, points = logits.shape
    masks = count if total is None else total
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / (masks * points + 1e-4)
    return bce, dice(logits.sigmoid(), target).sum() / (masks + 1e-4)


def dice(p: Float[Tensor, "N P"], target: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
    """Return 1 - (2 sum(p t) + 1) / (sum p + sum t + 1) per mask; +1 gives an empty mask predicted empty loss
    0."""
    return 1 - (2 * (p * target).sum(1) + 1) / (p.sum(1) + target.sum(1) + 1)


def focal(
    logits: Float[Tensor, "N P"], target: Float[Tensor, "N P"], *, alpha: float = 0.25, gamma: float = 2.0
) -> Float[Tensor, " N"]:
    """Return the sigmoid focal loss per mask, mean over its points (SAM2's training: alpha .25, gamma 2)."""
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = logits.sigmoid()
    pt = p * target + (1 - p) * (1 - target)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - pt) ** gamma * ce).mean(1)


def promptable_loss(
    logits: Float[Tensor, "N M H W"],
    ious: Float[Tensor, "N M"],
    object_score: Float[Tensor, " N"],
    targets: Bool[Tensor, "N S T"],
) -> Float[Tensor, ""]:
    """Compute SAM2's training loss: 20 focal + dice of the best of M masks, L1 of every predicted IoU, BCE of
    the object score.

    Mask and IoU terms count only if the object is present (video facts, A1), the latter only if it has a
    pixel at the decoder's resolution, for its IoU would be 0 whatever is drawn; mean over N.
    """
    count, masks = logits.shape[:2]
    size = logits.shape[-2:]
    # soft at the decoder's resolution
    target = F.interpolate(targets[:, None].float(), size=size, mode="area").flatten(1)
    flat, wide = logits.float().flatten(2), target[:, None].expand(-1, masks, -1).flatten(0, 1)
    cost = 20 * focal(flat.flatten(0, 1), wide).view(count, masks) + dice(
        flat.flatten(0, 1).sigmoid(), wide
    ).view(count, masks)
    present = targets.flatten(1).any(1)
    with torch.no_grad():
        predicted, true = flat > 0, target[:, None] > 0.5
        actual = (predicted & true).sum(2) / (predicted | true).sum(2).clamp(min=1)
    iou_error = (ious - actual).abs().mean(1) * (target > 0.5).any(1)
    shape_loss = ((cost.min(1).values + iou_error) * present).sum() / present.sum().clamp(min=1)
    return shape_loss + F.binary_cross_entropy_with_logits(object_score, present.float())


@torch.no_grad()
def mean_iou(logits: Float[Tensor, "N h w"], target: Bool[Tensor, "N S T"]) -> Float[Tensor, ""]:
    """Return the mean over objects at the target's size; both empty counts 1. 0 without any."""
    predicted = F.interpolate(logits[:, None].float(), size=target.shape[-2:], mode="bilinear")[:, 0] > 0
    return mask_iou(predicted, target).mean() if len(target) else logits.new_zeros(())
