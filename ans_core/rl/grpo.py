"""Rewards of a group -> advantages; log-probabilities and advantages -> a policy-gradient loss; two policies -> their KL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ans_core.metrics.mask import pairwise_iou

Scale = Literal["group", "batch", "within", "none"]
"""What centred rewards are divided by. group: the group's own standard deviation (GRPO). batch: that of all rewards (TRL's "batch"), in
which differences between samples count too. within: that of all centred rewards, pooled over groups. none: 1 (Dr. GRPO). All unbiased."""

Combine = Literal["sum_then_normalise", "normalise_then_sum"]
"""Reward parts are summed first, or made advantages first, each by itself, and their weighted sum normalised over the batch (GDPO), so
that a part of small spread is not drowned by another."""

Form = Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo"]
"""dapo: mean over the tokens of the step. bnpo: mean over a micro-batch's tokens, then over micro-batches and processes. grpo: mean over
each answer's tokens, then over answers (short ones weigh more). dr_grpo: sum over answers x longest answer allowed. gspo: one ratio an
answer (mean log-ratio), then as grpo. cispo: the clipped ratio as a constant weight, then as dapo. Names and formulas as TRL 1.16's
`loss_type`; gspo is its `importance_sampling_level="sequence"` with `loss_type="grpo"`."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp (verl, OpenRLHF)."""

TINY = 1e-12

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, kw_only=True)
class Objective:
    """How log-probabilities and advantages become a loss."""

    form: Form
    clip_low: float
    clip_high: float
    """Ratios are clipped to [1 - low, 1 + high]; cispo: to at most 1 + high."""
    max_tokens: int
    """Longest answer that can be said (dr_grpo's constant)."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a step's losses are divided by: counts over all its micro-batches and processes, whose losses then add up."""

    samples: float
    answers: float
    tokens: float
    """Of the policy's own, that are learned from."""
    micro_batches: float = 1.0


# Advantages


def weighted_sum(parts: Mapping[str, Float[Tensor, "B G"]], weights: Mapping[str, float]) -> Float[Tensor, "B G"]:
    """A rollout with a part that failed (NaN) has no reward (NaN): one without it can't be compared with its group."""
    return torch.stack([weights[name] * values for name, values in parts.items()]).sum(0)


def advantages_of_parts(
    parts: Mapping[str, Float[Tensor, "B G"]],
    weights: Mapping[str, float],
    *,
    combine: Combine,
    scale: Scale,
    std_floor: float,
    total: Total = _alone,
) -> Float[Tensor, "B G"]:
    """`normalise_then_sum` scales every part by `scale`, and the weighted sum by its standard deviation over the batch (floor: 1e-4, as
    TRL's epsilon: it is made of normalised numbers)."""
    if combine == "sum_then_normalise":
        return advantages(weighted_sum(parts, weights), scale=scale, std_floor=std_floor, total=total)
    known = ~weighted_sum(parts, weights).isnan()  # who lacks one part is in no baseline of another
    both = {name: torch.where(known, values, torch.nan) for name, values in parts.items()}
    single = {name: advantages(values, scale=scale, std_floor=std_floor, total=total) for name, values in both.items()}
    summed = torch.where(known, weighted_sum(single, weights), 0.0)
    mean, std = _over_all(summed[known], total)
    return torch.where(known & summed.ne(0), (summed - mean) / max(std, 1e-4), 0.0)


def _over_all(values: Float[Tensor, " K"], total: Total) -> tuple[float, float]:
    """(mean, unbiased standard deviation) over all processes; (0, 0) of nothing, deviation 0 of one."""
    values = values.double()
    summed, count = total(torch.stack([values.sum(), values.new_tensor(float(len(values)))])).tolist()
    mean = summed / max(count, 1.0)
    square = float(total((values - mean).pow(2).sum()))
    return mean, (square / max(count - 1, 1.0)) ** 0.5


def advantages(rewards: Float[Tensor, "B G"], *, scale: Scale, std_floor: float, total: Total = _alone) -> Float[Tensor, "B G"]:
    """Rewards minus their group's mean, divided by a standard deviation (`Scale`) of at least the floor.

    Equal rewards give exactly zero, compared directly: their float mean can be off by an ulp. NaN = a failed reward: left out of the
    baseline, advantage 0. The floor keeps noise of a nearly equal group from being blown up to +-1. Raises ValueError for G < 2.
    """
    if rewards.shape[1] < 2:
        raise ValueError(f"groups of {rewards.shape[1]} have no baseline; rl.group must be at least 2")
    known = ~rewards.isnan()
    same = _all_equal(rewards)[:, None]
    centred = torch.where(known & ~same, rewards - rewards.nanmean(1, keepdim=True), 0.0)
    if scale == "none":
        return centred
    square, count = centred.pow(2).sum(1, keepdim=True), known.sum(1, keepdim=True)
    if scale == "group":
        std = (square / (count - 1).clamp(min=1)).sqrt()
    elif scale == "within":
        whole, free = total(torch.stack([square.sum(), (count - 1).clamp(min=0).sum()]).double()).tolist()
        std = torch.tensor((whole / max(free, 1.0)) ** 0.5)
    else:
        std = torch.tensor(_over_all(rewards[known], total)[1])
    return centred / std.to(centred).clamp(min=max(std_floor, TINY))


def _all_equal(rewards: Float[Tensor, "B G"]) -> Bool[Tensor, " B"]:
    """Groups whose known rewards are all the same, or are none."""
    known = ~rewards.isnan()
    first = torch.where(known, rewards, torch.inf).amin(1, keepdim=True)
    return (~known | (rewards == first)).all(1)


def zero_spread(rewards: Float[Tensor, "B G"]) -> float:
    """Share of groups that teach nothing because all their rewards are equal (or failed)."""
    return float(_all_equal(rewards).float().mean())


def most_telling(rewards: Float[Tensor, "B G"], count: int) -> Int[Tensor, " count"]:
    """The `count` groups to learn from, in their order: those with a spread first (DAPO's dynamic sampling, with the candidates drawn
    beforehand)."""
    order = torch.argsort(_all_equal(rewards).int(), stable=True)
    return order[:count].sort().values


# The policy-gradient loss


def policy_loss(
    logps: Float[Tensor, " M"],
    behaviour: Float[Tensor, " M"],
    advantage: Float[Tensor, " M"],
    answer: Int[Tensor, " M"],
    objective: Objective,
    *,
    answers: int,
    totals: Totals | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """The loss of M tokens (or, with one token an answer, of M masks) that were sampled by `behaviour`.

    answer: which of `answers` answers a token belongs to; answers without a token in the loss count in grpo's, gspo's and dr_grpo's means.
    The ratio is against the policy that acted, never against the reference. totals: of the step that the tokens belong to; None = they are
    all. M = 0 gives 0 with a graph to nothing. Metrics: mean ratio, and shares of tokens held back by each clip.
    """
    if not len(logps):
        return logps.sum(), {}
    log_ratio = (logps - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lengths = torch.zeros(answers, device=logps.device).index_add(0, answer, torch.ones_like(logps))
    if objective.form == "gspo":
        mean = torch.zeros(answers, device=logps.device).index_add(0, answer, log_ratio) / lengths.clamp(min=1)
        log_ratio = mean[answer]
    ratio = log_ratio.exp()
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.form == "cispo":
        each = -ratio.detach().clamp(max=high) * advantage * logps
    else:
        each = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    with torch.no_grad():
        below, above = (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
        if objective.form == "cispo":
            below, above = torch.zeros_like(below), ratio > high
        metrics = {
            "ratio": float(ratio.mean()),
            "ratio_max": float(ratio.max()),
            "clip_low": float(below.float().mean()),
            "clip_high": float(above.float().mean()),
        }
    whole = totals or Totals(samples=1.0, answers=float(answers), tokens=float(len(logps)))
    return _aggregate(each, answer, lengths, objective, whole), metrics


def _aggregate(
    each: Float[Tensor, " M"], answer: Int[Tensor, " M"], lengths: Float[Tensor, " K"], objective: Objective, totals: Totals
) -> Float[Tensor, ""]:
    if objective.form in ("grpo", "gspo"):
        return (each / lengths[answer]).sum() / totals.answers
    if objective.form == "dr_grpo":
        return each.sum() / (totals.answers * objective.max_tokens)
    if objective.form == "bnpo":
        return each.mean() / totals.micro_batches
    return each.sum() / max(totals.tokens, 1.0)


# KL to the reference


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


def exact_kl(logits: Float[Tensor, "M V"], reference: Float[Tensor, "M V"]) -> Float[Tensor, ""]:
    """KL(policy || reference) of M categorical distributions, summed: for tokens that were given, which no sampled estimate fits."""
    policy, fixed = logits.float().log_softmax(dim=1), reference.float().log_softmax(dim=1)
    return F.kl_div(fixed, policy, log_target=True, reduction="sum")


# How much a group explores


def group_overlap(masks: Bool[Tensor, "B G H W"]) -> Float[Tensor, " B"]:
    """Mean IoU of two different masks of each group: 1 = the policy does not explore. Two empty masks count 1."""
    off = ~torch.eye(masks.shape[1], dtype=torch.bool, device=masks.device)
    return pairwise_iou(masks, masks)[:, off].mean(1)
