"""Logits and targets -> scalar losses, in the family's definitions (upstream's mmdet losses; parity is tested on golden values)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def text_loss(logits: Float[Tensor, "M V"], target: Int[Tensor, " M"]) -> Float[Tensor, ""]:
    """Cross-entropy in fp32, mean over the M learned tokens of the batch."""
    return F.cross_entropy(logits.float(), target)


def point_sample(maps: Float[Tensor, "N H W"], points: Float[Tensor, "N P 2"]) -> Float[Tensor, "N P"]:
    """Bilinear values at points (x, y) in [0, 1], corners not aligned, zero outside."""
    return F.grid_sample(maps[:, None], 2 * points[:, :, None] - 1, mode="bilinear", padding_mode="zeros", align_corners=False)[:, 0, :, 0]


@torch.no_grad()
def uncertain_points(
    logits: Float[Tensor, "N H W"], *, points: int, oversample: float = 3.0, importance: float = 0.75
) -> Float[Tensor, "N P 2"]:
    """Mask2Former's sampling: of oversample * points uniform points keep the share `importance` nearest to logit 0; fill up."""
    count = len(logits)
    candidates = torch.rand(count, int(points * oversample), 2, device=logits.device)
    uncertainty = -point_sample(logits.float(), candidates).abs()
    chosen = int(importance * points)
    best = uncertainty.topk(chosen, dim=1).indices
    kept = candidates.gather(1, best[:, :, None].expand(-1, -1, 2))
    return torch.cat([kept, torch.rand(count, points - chosen, 2, device=logits.device)], dim=1)


def mask_losses(
    logits: Float[Tensor, "N H W"], targets: Bool[Tensor, "N S T"], *, points: int
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """(BCE, dice) at the same `points` sampled points per mask; both are means over masks, weights not applied. N >= 1."""
    logits = logits.float()
    where = uncertain_points(logits, points=points)
    return point_losses(point_sample(logits, where), point_sample(targets.float(), where))


def point_losses(logits: Float[Tensor, "N P"], target: Float[Tensor, "N P"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Upstream's two mask losses before their weights (2.0 and 0.5): its averaging factors N*P and N carry +1e-4."""
    count, points = logits.shape
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / (count * points + 1e-4)
    return bce, dice(logits.sigmoid(), target).sum() / (count + 1e-4)


def dice(p: Float[Tensor, "N P"], target: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
    """1 - (2 sum(p t) + 1) / (sum p + sum t + 1) per mask: +1 keeps an empty mask predicted empty at loss 0."""
    return 1 - (2 * (p * target).sum(1) + 1) / (p.sum(1) + target.sum(1) + 1)


def focal(logits: Float[Tensor, "N P"], target: Float[Tensor, "N P"], *, alpha: float = 0.25, gamma: float = 2.0) -> Float[Tensor, " N"]:
    """Sigmoid focal loss per mask, mean over its points (SAM2's training: alpha .25, gamma 2)."""
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
    """SAM2's training loss: 20 focal + dice of the best of M masks, L1 of every predicted IoU, BCE of the object score.

    Mask and IoU terms count only where the object is present (video facts, A1); mean over N.
    """
    count, masks = logits.shape[:2]
    size = logits.shape[-2:]
    target = F.interpolate(targets[:, None].float(), size=size, mode="area").flatten(1)  # soft at the decoder's resolution
    flat, wide = logits.float().flatten(2), target[:, None].expand(-1, masks, -1).flatten(0, 1)
    cost = 20 * focal(flat.flatten(0, 1), wide).view(count, masks) + dice(flat.flatten(0, 1).sigmoid(), wide).view(count, masks)
    present = targets.flatten(1).any(1)
    with torch.no_grad():
        drawn, true = flat > 0, target[:, None] > 0.5
        actual = (drawn & true).sum(2) / (drawn | true).sum(2).clamp(min=1)
    iou_error = (ious - actual).abs().mean(1)
    shape_loss = ((cost.min(1).values + iou_error) * present).sum() / present.sum().clamp(min=1)
    return shape_loss + F.binary_cross_entropy_with_logits(object_score, present.float())


@torch.no_grad()
def mean_iou(logits: Float[Tensor, "N h w"], target: Bool[Tensor, "N S T"]) -> float:
    """Mean over objects at the target's size; both empty counts 1."""
    drawn = F.interpolate(logits[:, None].float(), size=target.shape[-2:], mode="bilinear")[:, 0] > 0
    both, either = (drawn & target).flatten(1).sum(1), (drawn | target).flatten(1).sum(1)
    return float(torch.where(either > 0, both / either.clamp(min=1), 1.0).mean()) if len(target) else 0.0
