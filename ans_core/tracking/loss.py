"""Mask logits, predicted IoUs and object scores of one frame -> the parts of SAM2's training loss, summed
over objects."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ans_core.config.memory import MemoryLoss
from ans_core.losses import dice, focal


def frame_losses(
    logits: Float[Tensor, "N M h w"],
    ious: Float[Tensor, "N M"],
    object_score: Float[Tensor, " N"],
    target: Bool[Tensor, "N S S"],
    weights: MemoryLoss,
) -> dict[str, Float[Tensor, ""]]:
    """Return the parts `mask`, `dice`, `iou` and `object`, weights not applied, each a sum over the N
    objects.

    Of M masks the one with the lowest weighted mask + dice loss learns; every predicted IoU learns the IoU of
    its mask. Both count where the object is present; its score counts everywhere. Masks are compared at the
    decoder's resolution, with soft targets; an object too small to have a pixel there teaches no IoU, which
    would be 0 whatever is drawn.
    """
    count, masks = logits.shape[:2]
    present = target.flatten(1).any(1)
    soft = F.interpolate(target[:, None].float(), size=logits.shape[-2:], mode="area").flatten(1)
    flat, wide = logits.float().flatten(2).flatten(0, 1), soft.repeat_interleave(masks, dim=0)
    pixels = (
        focal(flat, wide)
        if weights.kind == "focal"
        else F.binary_cross_entropy_with_logits(flat, wide, reduction="none").mean(1)
    )
    pixels, overlap = pixels.view(count, masks), dice(flat.sigmoid(), wide).view(count, masks)
    best = (weights.mask * pixels + weights.dice * overlap).argmin(dim=1, keepdim=True)
    with torch.no_grad():
        predicted, true = flat > 0, wide > 0.5
        actual = ((predicted & true).sum(1) / (predicted | true).sum(1).clamp(min=1)).view(count, masks)
    return {
        "mask": (pixels.gather(1, best)[:, 0] * present).sum(),
        "dice": (overlap.gather(1, best)[:, 0] * present).sum(),
        "iou": ((ious.float() - actual).abs().mean(1) * (soft > 0.5).any(1)).sum(),
        "object": F.binary_cross_entropy_with_logits(object_score.float(), present.float(), reduction="sum"),
    }


def total(parts: dict[str, Tensor], weights: MemoryLoss) -> Float[Tensor, ""]:
    """Return the weighted sum of the parts."""
    return (
        weights.mask * parts["mask"]
        + weights.dice * parts["dice"]
        + weights.iou * parts["iou"]
        + weights.object * parts["object"]
    )
