"""Rewards of a group -> advantages; log-probabilities and advantages -> the clipped policy-gradient loss; two policies -> their KL."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

Scale = Literal["group", "batch", "none"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp (verl, OpenRLHF)."""


def advantages(rewards: Float[Tensor, "B G"], *, scale: Scale, std_floor: float) -> Float[Tensor, "B G"]:
    """Rewards minus their group's mean, divided by a standard deviation (of the group, or of all centred rewards) at least the floor.

    Equal rewards give exactly zero, compared directly: their float mean can be off by an ulp. NaN = a failed reward: left out of the
    baseline, advantage 0. The floor keeps noise of a nearly equal group from being blown up to +-1. Raises ValueError for G < 2.
    """
    if rewards.shape[1] < 2:
        raise ValueError(f"groups of {rewards.shape[1]} have no baseline; rl.group must be at least 2")
    known = ~rewards.isnan()
    first = torch.where(known, rewards, torch.inf).amin(1, keepdim=True)
    same = (~known | (rewards == first)).all(1, keepdim=True)
    centred = torch.where(known & ~same, rewards - rewards.nanmean(1, keepdim=True), 0.0)
    if scale == "none":
        return centred
    square = centred.pow(2)
    if scale == "group":
        std = (square.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)).sqrt()
    else:
        std = (square.sum() / known.sum().clamp(min=1)).sqrt()
    return centred / std.clamp(min=std_floor)


def clipped_loss(
    logps: Float[Tensor, " M"], behaviour: Float[Tensor, " M"], advantage: Float[Tensor, " M"], *, clip_low: float, clip_high: float
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """PPO's clipped objective, mean over the M actions (tokens of all completions, so long ones weigh more: DAPO; or masks).

    The ratio is against the policy that acted, never against the reference. M = 0 gives 0 with a graph to nothing.
    """
    if not len(logps):
        return logps.sum(), {}
    log_ratio = (logps - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    with torch.no_grad():
        low = ((ratio < 1 - clip_low) & (advantage < 0)).float().mean()
        high = ((ratio > 1 + clip_high) & (advantage > 0)).float().mean()
    return loss.mean(), {"ratio": float(ratio.detach().mean()), "clip_low": float(low), "clip_high": float(high)}


def token_kl(logps: Float[Tensor, " M"], reference: Float[Tensor, " M"]) -> tuple[Float[Tensor, ""], float]:
    """(loss term, estimate) of KL(policy || reference) over sampled tokens: k2's gradient, which is the reverse KL's, with k3's value.

    Schulman's k3 = exp(d) - 1 - d with d = reference - policy is never negative; its gradient is not the KL's (1.47 times too large).
    k1 in the loss has expected gradient 0: it regularises nothing.
    """
    if not len(logps):
        return logps.sum(), 0.0
    difference = (reference - logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = (difference.exp() - 1 - difference).mean().detach()
    return 0.5 * difference.pow(2).mean(), float(k3)


def zero_spread(rewards: Float[Tensor, "B G"]) -> float:
    """Share of groups that teach nothing because all their rewards are equal."""
    return float((rewards == rewards[:, :1]).all(1).float().mean())


def pairwise_iou(masks: Bool[Tensor, "B G H W"]) -> float:
    """Mean IoU of two different masks of a group: 1 = the policy does not explore. Both empty counts 1."""
    flat = masks.flatten(2).float()
    both = flat @ flat.transpose(1, 2)  # (B, G, G)
    size = flat.sum(2)
    either = size[:, :, None] + size[:, None, :] - both
    iou = torch.where(either > 0, both / either.clamp(min=1), 1.0)
    off = ~torch.eye(masks.shape[1], dtype=torch.bool, device=masks.device)
    return float(iou[:, off].mean())


def exact_kl(logits: Float[Tensor, "M V"], reference: Float[Tensor, "M V"]) -> Float[Tensor, ""]:
    """KL(policy || reference) of M categorical distributions, summed: for tokens that were given, which no sampled estimate fits."""
    policy, fixed = logits.float().log_softmax(dim=1), reference.float().log_softmax(dim=1)
    return F.kl_div(fixed, policy, log_target=True, reduction="sum")
