"""GRPO: rewards of a group -> advantages; log-probabilities and advantages -> policy-gradient loss; two
policies -> their KL."""

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
"""What centred rewards are divided by. group: the group's own standard deviation (GRPO). batch: the standard
deviation of all rewards (TRL's "batch"), which includes differences between samples. within: the standard
deviation of all centred rewards, pooled over groups. none: 1 (Dr. GRPO). All standard deviations are
unbiased."""

Combine = Literal["sum_then_normalise", "normalise_then_sum"]
"""sum_then_normalise: sum the reward parts, then compute advantages. normalise_then_sum: compute advantages
of each part, then normalise their weighted sum over the batch (GDPO), so that a part of small spread is not
drowned by another."""

Form = Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo"]
"""How the loss is averaged. dapo: mean over the tokens of the step. bnpo: mean over a micro-batch's tokens,
then over micro-batches and processes. grpo: mean over each answer's tokens, then over answers (tokens of
short answers weigh more). dr_grpo: sum over tokens, divided by answers x longest answer allowed. gspo: one
ratio per answer (mean log-ratio), then as grpo. cispo: the clipped ratio as a constant weight, then as dapo.
Names and formulas follow `loss_type` of TRL 1.16; gspo is its `importance_sampling_level="sequence"` with
`loss_type="grpo"`."""

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
    """Longest answer allowed (dr_grpo's constant)."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a step's losses are divided by: counts over all its micro-batches and processes, so that their
    losses add up."""

    samples: float
    answers: float
    tokens: float
    """Tokens sampled by the policy that are learned from."""
    micro_batches: float = 1.0


# Advantages


def weighted_sum(
    parts: Mapping[str, Float[Tensor, "B G"]], weights: Mapping[str, float]
) -> Float[Tensor, "B G"]:
    """Sum the reward parts by weight. A rollout with a failed part (NaN) gets NaN: without the part it can't
    be compared with its group."""
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
    """Compute advantages from several reward parts.

    `normalise_then_sum` divides each part by its `scale`, and the weighted sum by its standard deviation over
    the batch. The floor of the latter is 1e-4, TRL's epsilon, because the sum is made of normalised numbers.
    """
    if combine == "sum_then_normalise":
        return advantages(weighted_sum(parts, weights), scale=scale, std_floor=std_floor, total=total)
    # a rollout that lacks one part is left out of the other parts' baselines
    known = ~weighted_sum(parts, weights).isnan()
    both = {name: torch.where(known, values, torch.nan) for name, values in parts.items()}
    single = {
        name: advantages(values, scale=scale, std_floor=std_floor, total=total)
        for name, values in both.items()
    }
    summed = torch.where(known, weighted_sum(single, weights), 0.0)
    mean, std = _over_all(summed[known], total)
    return torch.where(known & summed.ne(0), (summed - mean) / max(std, 1e-4), 0.0)


def _over_all(values: Float[Tensor, " K"], total: Total) -> tuple[float, float]:
    """Return (mean, unbiased standard deviation) over all processes; (0, 0) without values, deviation 0 for
    one value."""
    values = values.double()
    summed, count = total(torch.stack([values.sum(), values.new_tensor(float(len(values)))])).tolist()
    mean = summed / max(count, 1.0)
    square = float(total((values - mean).pow(2).sum()))
    return mean, (square / max(count - 1, 1.0)) ** 0.5


def advantages(
    rewards: Float[Tensor, "B G"], *, scale: Scale, std_floor: float, total: Total = _alone
) -> Float[Tensor, "B G"]:
    """Subtract the group's mean from rewards and divide by a standard deviation (`Scale`) of at least
    `std_floor`.

    Groups of equal rewards get exactly zero; equality is tested directly because a float mean can be off by
    an ulp. A failed reward (NaN) is left out of the baseline and gets advantage 0. The floor keeps the noise
    of a nearly equal group from being scaled up to +-1. Raises ValueError for G < 2.
    """
    if rewards.shape[1] < 2:
        raise ValueError(f"groups of {rewards.shape[1]} have no baseline; rl.group must be at least 2")
    known = ~rewards.isnan()
    centred = _centred(rewards)
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


def _centred(rewards: Float[Tensor, "B G"]) -> Float[Tensor, "B G"]:
    """Subtract the group's mean; exactly 0 in groups of equal rewards, and where a reward failed."""
    learned = ~rewards.isnan() & ~_all_equal(rewards)[:, None]
    return torch.where(learned, rewards - rewards.nanmean(1, keepdim=True), 0.0)


def _all_equal(rewards: Float[Tensor, "B G"]) -> Bool[Tensor, " B"]:
    """Tell which groups have known rewards that are all equal, or no known rewards."""
    known = ~rewards.isnan()
    first = torch.where(known, rewards, torch.inf).amin(1, keepdim=True)
    return (~known | (rewards == first)).all(1)


def zero_spread(rewards: Float[Tensor, "B G"]) -> float:
    """Return the share of groups that teach nothing because all their rewards are equal (or failed)."""
    return float(_all_equal(rewards).float().mean())


def most_telling(rewards: Float[Tensor, "B G"], count: int) -> Int[Tensor, " count"]:
    """Choose the `count` groups to learn from, those whose rewards vary most; return their indices in
    ascending order.

    Groups of equal rewards come last: DAPO's dynamic sampling leaves these out. Here all candidates are drawn
    beforehand, and the others are ranked, too: a mask redrawn with a pixel more is no lesson.
    """
    known = (~rewards.isnan()).sum(1).clamp(min=1)
    order = torch.argsort(_centred(rewards).pow(2).sum(1) / known, descending=True, stable=True)
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
    """Return the loss of M tokens (or of M masks, one token an answer) that were sampled with
    log-probabilities `behaviour`, and metrics.

    answer: which of the `answers` answers a token belongs to. Answers without a token in the loss still count
    in the means of grpo, gspo and dr_grpo. The ratio is against the policy that sampled, never against the
    reference. totals: counts of the whole step; None = these tokens are the whole step. M = 0 gives a loss of
    0 that is attached to the (empty) graph. Metrics: mean and largest ratio, the share of tokens held back by
    each clip, and `policy_loss`, whose mean over all micro-batches is the step's loss.
    """
    if not len(logps):
        return logps.sum(), {"policy_loss": 0.0}
    log_ratio = (logps - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lengths = torch.zeros(answers, device=logps.device).index_add(0, answer, torch.ones_like(logps))
    if objective.form == "gspo":
        mean = torch.zeros(answers, device=logps.device).index_add(0, answer, log_ratio) / lengths.clamp(
            min=1
        )
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
    loss = _aggregate(each, answer, lengths, objective, whole)
    return loss, metrics | {"policy_loss": float(loss.detach()) * whole.micro_batches}


def _aggregate(
    each: Float[Tensor, " M"],
    answer: Int[Tensor, " M"],
    lengths: Float[Tensor, " K"],
    objective: Objective,
    totals: Totals,
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
    """Return (loss term, estimate) of KL(policy || reference) over sampled tokens: the loss term is k2, whose
    gradient is that of the reverse KL; the estimate is k3.

    Schulman's k3 = exp(d) - 1 - d with d = reference - policy is never negative, but its gradient is not the
    KL's (1.47 times too large). k1 as a loss has expected gradient 0, so it regularises nothing.
    """
    if not len(logps):
        return logps.sum(), 0.0
    difference = (reference - logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = (difference.exp() - 1 - difference).mean().detach()
    return 0.5 * difference.pow(2).mean(), float(k3)


def exact_kl(logits: Float[Tensor, "M V"], reference: Float[Tensor, "M V"]) -> Float[Tensor, ""]:
    """Return KL(policy || reference) summed over M categorical distributions. It is for given tokens:
    estimates from samples don't apply to them."""
    policy, fixed = logits.float().log_softmax(dim=1), reference.float().log_softmax(dim=1)
    return F.kl_div(fixed, policy, log_target=True, reduction="sum")


# How much a group explores


def group_overlap(masks: Bool[Tensor, "B G H W"]) -> Float[Tensor, " B"]:
    """Mean IoU of two different masks of each group: 1 = the policy does not explore. Two empty masks count
    1."""
    off = ~torch.eye(masks.shape[1], dtype=torch.bool, device=masks.device)
    return pairwise_iou(masks, masks)[:, off].mean(1)
