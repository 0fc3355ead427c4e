from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ans_core.rl import grpo, mask_policy
from ans_core.rl.mask_policy import (
    GridGaussian,
    MaskActions,
    MaskSampling,
    steered,
)

Decoder = Callable[[Tensor], Tensor]


def generators(seed: int, count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + i) for i in range(count)]


def logits(batch: int = 2, size: int = 16, seed: int = 5) -> Tensor:
    return 3 * torch.randn(batch, size, size, generator=torch.Generator().manual_seed(seed))


def decoder(size: int = 16, width: int = 8) -> Decoder:
    """Any smooth map of an embedding to a mask."""
    weights = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(1))
    out = torch.randn(2 * width, size * size, generator=torch.Generator().manual_seed(2)) / 2

    def decode(embeddings: Tensor) -> Tensor:
        return ((embeddings @ weights).tanh() @ out).unflatten(1, (size, size))

    return decode


def how(width: float, scale: float, generators: list[torch.Generator], group: int) -> MaskSampling:
    return MaskSampling(width=width, scale=scale, generators=generators, group=group)


def act(
    policy: GridGaussian,
    what: Tensor,
    *,
    group: int = 4,
    width: float = 0.5,
    scale: float = 2.0,
    seed: int = 0,
) -> MaskActions:
    return policy.act(what, how(width, scale, generators(seed, len(what)), group))


def grid(cells: int = 4) -> GridGaussian:
    return GridGaussian(cells)


def test_actions_follow_the_generators_of_their_samples():
    what = logits()
    one, again, other = act(grid(), what), act(grid(), what), act(grid(), what, seed=1)
    assert torch.equal(one.choice, again.choice)
    assert torch.equal(one.masks, again.masks)
    assert not torch.equal(one.choice, other.choice)
    alone = grid().act(what[1:], how(0.5, 2.0, generators(0, 2)[1:], 4))
    assert torch.equal(alone.masks[0], one.masks[1])


def test_the_log_prob_of_a_stored_action_draws_nothing_anew():
    what = logits()
    actions = act(grid(), what)
    kept = actions.choice.clone()
    torch.manual_seed(0)
    one = grid().log_prob(what, actions)
    torch.manual_seed(1)
    assert torch.equal(one, grid().log_prob(what, actions))
    assert torch.equal(actions.choice, kept)
    assert one.shape == (2, 4)


def test_the_ratio_is_one_at_first_and_the_kl_exactly_zero():
    what = logits().requires_grad_()
    fixed = what.detach()
    actions = act(grid(), fixed)
    logps = grid().log_prob(what, actions).flatten()
    objective = grpo.Objective(form="dapo", clip_low=0.2, clip_high=0.28, max_tokens=1)
    _, metrics = grpo.policy_loss(logps, logps.detach(), torch.ones(8), torch.arange(8), objective, answers=8)
    assert metrics["ratio"] == 1.0
    kl = grid().kl(what, fixed, actions)
    kl.backward()
    assert kl.item() == 0
    assert what.grad is not None
    assert what.grad.abs().max() < 1e-7


def test_confidence_is_the_mean_probability_of_what_is_drawn():
    actions = act(grid(), logits())
    assert (actions.confidence > 0.5).all()
    assert (actions.confidence <= 1).all()
    empty = act(grid(), torch.full((1, 16, 16), -50.0), scale=1e-6)
    nothing = ~empty.masks.flatten(2).any(2)
    assert (empty.confidence[nothing] == 0).all()


def test_the_mean_of_the_policy_is_the_logits_pooled_over_cells():
    z = torch.arange(16.0).view(1, 4, 4)
    assert GridGaussian(2).mean(z)[0].tolist() == [[2.5, 4.5], [10.5, 12.5]]


def test_actions_lie_around_the_mean_in_units_of_the_scale():
    what = logits()
    many = act(grid(), what, group=4000)
    mean = GridGaussian(4).mean(what) / 2.0
    assert (many.choice.mean(1) - mean).abs().max() < 5 * 0.5 / math.sqrt(4000)
    assert many.choice.std(1).mean().item() == pytest.approx(0.5, rel=0.02)


def test_without_noise_the_mask_is_the_thresholded_logits():
    what = logits()
    found = act(grid(), what, width=1e-9).masks
    assert torch.equal(found, (what > 0)[:, None].expand_as(found))


def test_log_prob_by_hand():
    """One cell, u = 1, mean 0, width 1/2: -1 / (2 / 4) = -2. The second action sits on the mean: 0."""
    actions = MaskActions(
        choice=torch.tensor([[[[1.0]], [[0.0]]]]),
        masks=torch.zeros(1, 2, 2, 2, dtype=torch.bool),
        confidence=torch.zeros(1, 2),
        scale=1.0,
        width=0.5,
    )
    assert grid(1).log_prob(torch.zeros(1, 2, 2), actions).tolist() == [[-2.0, 0.0]]
    assert grid(1).log_prob(torch.full((1, 2, 2), 1.0), actions).tolist() == [[0.0, -2.0]]


def test_the_kl_is_that_of_the_gaussians_per_number():
    one, other = logits(), logits() + 0.3
    actions = act(grid(), one)
    gaussians = [torch.distributions.Normal(GridGaussian(4).mean(d) / 2.0, 0.5) for d in (one, other)]
    expected = torch.distributions.kl_divergence(*gaussians).mean().item()
    assert grid().kl(one, other, actions).item() == pytest.approx(expected, rel=1e-5)


# The gradient


def reward(masks: Tensor, target: Tensor) -> Tensor:
    both, either = (masks & target).flatten(2).sum(2), (masks | target).flatten(2).sum(2)
    return both / either.clamp(min=1)


def estimated(
    policy: GridGaussian,
    what: Tensor,
    own: Tensor,
    target: Tensor,
    *,
    group: int,
    width: float,
    seed: int = 0,
) -> Tensor:
    """The gradient of the expected reward with respect to `own`, by GRPO's loss."""
    fixed = what.detach()
    actions = policy.act(fixed, how(width, 1.0, generators(seed, 1), group))
    advantage = grpo.advantages(reward(actions.masks, target), scale="none", std_floor=0.02).flatten()
    logps = policy.log_prob(what, actions).flatten()
    objective = grpo.Objective(form="dapo", clip_low=0.2, clip_high=0.28, max_tokens=1)
    loss, _ = grpo.policy_loss(
        logps, logps.detach(), advantage, torch.arange(group), objective, answers=group
    )
    return -torch.autograd.grad(loss, own)[0]


def corner(size: int) -> Tensor:
    target = torch.zeros(1, 1, size, size, dtype=torch.bool)
    target[..., : 2 * size // 3, size // 3 :] = True
    return target


def test_the_policy_gradient_points_along_the_gradient_of_the_expected_reward():
    """3 x 3 masks of 3 x 3 cells, so every mask has a known probability: the expectation of IoU over all 512
    is differentiated exactly."""
    z = 0.5 * torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(2))
    free, own = z.clone().requires_grad_(), z.clone().requires_grad_()
    every = torch.cartesian_prod(*[torch.tensor([False, True])] * 9).view(1, 512, 3, 3)
    on = torch.distributions.Normal(0.0, 1.0).cdf(free / 0.8)
    probability = torch.where(every, on[:, None], 1 - on[:, None]).flatten(2).prod(2)
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)
    (probability * reward(every, corner(3))).sum().backward()
    found = estimated(grid(3), own, own, corner(3), group=20_000, width=0.8)
    assert free.grad is not None
    assert F.cosine_similarity(found.flatten(), free.grad.flatten(), dim=0) > 0.95
    # the log-density is a mean over 9 numbers
    assert found.norm().item() == pytest.approx(free.grad.norm().item() / 9, rel=0.1)


def test_the_policy_gradient_moves_coarse_cells_along_the_expected_reward_too():
    """12 x 12 masks, 3 x 3 cells: against finite differences of the mean reward under the same noise, cell by
    cell."""
    z = torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(3))
    target, step, true = corner(12), 0.1, torch.zeros(3, 3)
    for row in range(3):
        for column in range(3):
            bump = torch.zeros(1, 1, 3, 3)
            bump[..., row, column] = step
            wide = F.interpolate(bump, size=(12, 12), mode="bilinear", align_corners=False)[:, 0]
            up, down = (
                reward(act(grid(3), z + s * wide, group=4000, scale=1.0, width=0.8).masks, target).mean()
                for s in (1, -1)
            )
            true[row, column] = (up - down) / (2 * step)
    own = z.clone().requires_grad_()
    found = F.avg_pool2d(estimated(grid(3), own, own, target, group=4000, width=0.8)[:, None], 4)
    assert F.cosine_similarity(found.flatten(), true.flatten(), dim=0) > 0.95


@pytest.mark.slow
def test_the_policy_gradient_reaches_an_embedding_through_a_tiny_decoder():
    """Against finite differences of the mean reward of many masks under the same noise, number by number of
    the embedding. The policy acts on the pooled logits alone: what lies within a cell stays as it was when it
    acted."""
    decode, target, count, step, policy = decoder(12), corner(12), 40_000, 0.05, grid(3)
    start = 0.5 * torch.randn(1, 8, generator=torch.Generator().manual_seed(4))
    before = decode(start)

    def expected(at: Tensor) -> float:
        moved = F.adaptive_avg_pool2d(decode(at) - before, 3)[:, None]
        z = before + F.interpolate(moved, size=(12, 12), mode="bilinear", align_corners=False)[:, 0]
        actions = policy.act(z, how(0.3, 1.0, generators(1, 1), count))
        return reward(actions.masks, target).mean().item()

    shift = step * torch.eye(8)[:, None]
    true = torch.tensor([(expected(start + s) - expected(start - s)) / (2 * step) for s in shift])
    own = start.clone().requires_grad_()
    found = estimated(policy, decode(own), own, target, group=count, width=0.3, seed=1)
    assert F.cosine_similarity(found.flatten(), true, dim=0) > 0.95


# Width


def test_the_width_is_widened_for_masks_too_alike_and_narrowed_for_masks_too_different():
    assert steered(1.0, 0.95) == pytest.approx(math.exp(0.05))
    assert steered(1.0, 0.5) == pytest.approx(math.exp(-0.05))
    assert steered(1.0, 0.8) == 1.0


@pytest.mark.slow
def test_steering_brings_the_group_into_its_band_from_either_side():
    coarse = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    what, policy = 3 * F.interpolate(coarse, size=(16, 16), mode="bilinear")[:, 0], grid()
    low, high = mask_policy.TARGET_IOU
    for width in (0.01, 10.0):
        for step in range(250):
            alike = float(grpo.group_overlap(act(policy, what, width=width, seed=step, group=6).masks).mean())
            width = steered(width, alike)
        assert low - 0.05 < alike < high + 0.05
