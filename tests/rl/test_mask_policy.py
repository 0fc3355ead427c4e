from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ans_core.rl import grpo, mask_policy


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits(batch: int = 2, size: int = 16) -> Tensor:
    return 3 * torch.randn(batch, size, size, generator=generator(5))


def act(z: Tensor, *, group: int = 4, cells: int = 4, sigma: float = 0.5, scale: float = 2.0, seed: int = 0) -> mask_policy.MaskActions:
    return mask_policy.act(z, group=group, cells=cells, sigma=sigma, scale=scale, generator=generator(seed))


def test_the_mean_of_the_policy_is_the_logits_pooled_over_cells_in_units_of_the_scale():
    z = torch.arange(16.0).view(1, 4, 4)
    assert mask_policy.pooled(z, cells=2, scale=2.0)[0].tolist() == [[1.25, 2.25], [5.25, 6.25]]


def test_actions_follow_the_generator_and_lie_around_the_mean():
    z = logits()
    one, again, other = act(z), act(z), act(z, seed=1)
    assert torch.equal(one.grid, again.grid)
    assert torch.equal(one.masks, again.masks)
    assert not torch.equal(one.masks, other.masks)
    many = act(z, group=4000)
    mean = mask_policy.pooled(z, cells=4, scale=2.0)
    assert (many.grid.mean(1) - mean).abs().max() < 5 * 0.5 / math.sqrt(4000)
    assert many.grid.std(1).mean().item() == pytest.approx(0.5, rel=0.02)


def test_without_noise_the_mask_is_the_thresholded_logits():
    z = logits()
    drawn = act(z, sigma=1e-9).masks
    assert torch.equal(drawn, (z > 0)[:, None].expand_as(drawn))


def test_log_prob_by_hand():
    """One cell, u = 1, mean 0, sigma 1/2: -1 / (2 / 4) = -2. The second action sits on the mean: 0."""
    actions = mask_policy.MaskActions(
        grid=torch.tensor([[[[1.0]], [[0.0]]]]), masks=torch.zeros(1, 2, 2, 2, dtype=torch.bool), scale=1.0, sigma=0.5
    )
    assert mask_policy.log_prob(torch.zeros(1, 2, 2), actions).tolist() == [[-2.0, 0.0]]
    assert mask_policy.log_prob(torch.full((1, 2, 2), 1.0), actions).tolist() == [[0.0, -2.0]]


def test_the_log_prob_of_a_stored_action_draws_nothing_anew():
    z = logits()
    actions = act(z)
    kept = actions.grid.clone()
    torch.manual_seed(0)
    one = mask_policy.log_prob(z, actions)
    torch.manual_seed(1)
    assert torch.equal(one, mask_policy.log_prob(z, actions))
    assert torch.equal(actions.grid, kept)


def test_the_ratio_is_one_at_first_and_the_kl_exactly_zero():
    z = logits().requires_grad_()
    actions = act(z.detach())
    logps = mask_policy.log_prob(z, actions)
    _, metrics = grpo.clipped_loss(logps.flatten(), logps.detach().flatten(), torch.ones(8), clip_low=0.2, clip_high=0.28)
    assert metrics["ratio"] == 1.0
    kl = mask_policy.kl(z, z.detach(), actions)
    kl.backward()
    assert kl.item() == 0
    assert z.grad is not None
    assert z.grad.count_nonzero() == 0


def test_the_kl_is_that_of_the_gaussians_per_number():
    actions, one, other = act(logits()), logits(), logits() + 0.3
    means = [mask_policy.pooled(z, cells=4, scale=2.0) for z in (one, other)]
    gaussians = [torch.distributions.Normal(m, 0.5) for m in means]
    expected = torch.distributions.kl_divergence(*gaussians).mean().item()
    assert mask_policy.kl(one, other, actions).item() == pytest.approx(expected, rel=1e-5)


def reward(masks: Tensor, target: Tensor) -> Tensor:
    both, either = (masks & target).flatten(2).sum(2), (masks | target).flatten(2).sum(2)
    return both / either.clamp(min=1)


def test_the_policy_gradient_points_along_the_gradient_of_the_expected_reward():
    """3 x 3 masks of 3 x 3 cells, so every mask has a known probability: the expectation of IoU over all 512 is differentiated exactly."""
    z = 0.5 * torch.randn(1, 3, 3, generator=generator(2))
    target = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    target[..., :2, 1:] = True
    scale, sigma = 1.0, 0.8
    free = z.clone().requires_grad_()
    every = torch.cartesian_prod(*[torch.tensor([False, True])] * 9).view(1, 512, 3, 3)
    on = torch.distributions.Normal(0.0, 1.0).cdf(free / (scale * sigma))[:, None]
    probability = torch.where(every, on, 1 - on).flatten(2).prod(2)
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)
    (probability * reward(every, target)).sum().backward()

    own = z.clone().requires_grad_()
    actions = act(z, group=20000, cells=3, sigma=sigma, scale=scale)
    advantage = grpo.advantages(reward(actions.masks, target), scale="none", std_floor=0.02)
    logps = mask_policy.log_prob(own, actions)
    loss, _ = grpo.clipped_loss(logps.flatten(), logps.detach().flatten(), advantage.flatten(), clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert free.grad is not None
    assert own.grad is not None
    assert F.cosine_similarity(-own.grad.flatten(), free.grad.flatten(), dim=0) > 0.95
    assert own.grad.norm().item() == pytest.approx(free.grad.norm().item() / 9, rel=0.1)  # the log-density is a mean over 9 numbers


def test_the_policy_gradient_moves_coarse_cells_along_the_expected_reward_too():
    """12 x 12 masks, 3 x 3 cells: against finite differences of the mean reward under the same noise, cell by cell."""
    z = torch.randn(1, 12, 12, generator=generator(3))
    target = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
    target[..., :8, 4:] = True
    step, true = 0.1, torch.zeros(3, 3)
    for row in range(3):
        for column in range(3):
            bump = torch.zeros(1, 1, 3, 3)
            bump[..., row, column] = step
            wide = F.interpolate(bump, size=(12, 12), mode="bilinear", align_corners=False)[:, 0]
            up, down = (reward(act(z + s * wide, group=4000, cells=3, scale=1.0, sigma=0.8).masks, target).mean() for s in (1, -1))
            true[row, column] = (up - down) / (2 * step)
    own = z.clone().requires_grad_()
    actions = act(z, group=4000, cells=3, scale=1.0, sigma=0.8)
    advantage = grpo.advantages(reward(actions.masks, target), scale="none", std_floor=0.02)
    (-(mask_policy.log_prob(own, actions) * advantage).mean()).backward()
    assert own.grad is not None
    found = F.avg_pool2d(-own.grad[:, None], 4)[0, 0]
    assert F.cosine_similarity(found.flatten(), true.flatten(), dim=0) > 0.95


def test_sigma_is_widened_for_masks_too_alike_and_narrowed_for_masks_too_different():
    assert mask_policy.steered(1.0, 0.95) == pytest.approx(math.exp(0.05))
    assert mask_policy.steered(1.0, 0.5) == pytest.approx(math.exp(-0.05))
    assert mask_policy.steered(1.0, 0.8) == 1.0


def test_steering_brings_the_group_into_its_band_from_either_side():
    z = 3 * F.interpolate(torch.randn(8, 1, 4, 4, generator=generator(1)), size=(16, 16), mode="bilinear")[:, 0]
    low, high = mask_policy.TARGET_IOU
    for sigma in (0.01, 10.0):
        for step in range(200):
            alike = grpo.pairwise_iou(act(z, sigma=sigma, seed=step, group=6).masks)
            sigma = mask_policy.steered(sigma, alike)
        assert low - 0.05 < alike < high + 0.05
