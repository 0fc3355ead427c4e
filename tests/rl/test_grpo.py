from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from ans_core.rl import grpo


def on_policy(advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logps = torch.randn(len(advantage), generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss, _ = grpo.clipped_loss(logps, logps.detach(), advantage, clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert logps.grad is not None
    return loss.detach(), logps.grad


# Advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_teach_exactly_nothing(scale: grpo.Scale):
    """0.1 * 3 / 3 is not 0.1 in floats: a mean can be off by an ulp, which a small floor would blow up."""
    for value in (0.1, 1 / 3, 0.7, 1e-8, 123.456, *torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist()):
        for group in range(2, 18):
            found = grpo.advantages(torch.full((2, group), value), scale=scale, std_floor=1e-12)
            assert found.count_nonzero() == 0


def test_advantages_by_hand():
    """Group 0: 0, 1 -> centred -.5, .5, own deviation .5. Group 1: 0, 3 -> -1.5, 1.5.

    Of all: sqrt((2 * .25 + 2 * 2.25) / 4) = sqrt 1.25.
    """
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])

    def found(scale: grpo.Scale) -> list[list[float]]:
        return grpo.advantages(rewards, scale=scale, std_floor=0.02).tolist()

    assert found("none") == [[-0.5, 0.5], [-1.5, 1.5]]
    assert found("group") == [[-1.0, 1.0], [-1.0, 1.0]]
    assert found("batch")[0] == pytest.approx([-0.5 / math.sqrt(1.25), 0.5 / math.sqrt(1.25)])
    assert found("batch")[1] == pytest.approx([-1.5 / math.sqrt(1.25), 1.5 / math.sqrt(1.25)])


def test_the_floor_keeps_a_small_difference_small():
    rewards = torch.tensor([[0.500, 0.504]])
    assert grpo.advantages(rewards, scale="group", std_floor=0.02).tolist()[0] == pytest.approx([-0.1, 0.1], rel=1e-3)
    assert grpo.advantages(rewards, scale="batch", std_floor=0.02).tolist()[0] == pytest.approx([-0.1, 0.1], rel=1e-3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_failed_reward_is_left_out_of_the_baseline(scale: grpo.Scale):
    """1, NaN, 3: mean 2, deviation 1 (of two); the failed one has advantage 0. A group of failures, or of one known, teaches nothing."""
    nan = math.nan
    rewards = torch.tensor([[1.0, nan, 3.0], [nan, nan, nan], [nan, 5.0, nan]])
    found = grpo.advantages(rewards, scale=scale, std_floor=0.02)
    if scale == "batch":  # over the 3 known of 9: sqrt(2 / 3)
        assert found[0].tolist() == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)])
    else:
        assert found[0].tolist() == [-1.0, 0.0, 1.0]
    assert found[1:].count_nonzero() == 0


def test_advantages_of_a_group_sum_to_zero_and_do_not_see_a_shift():
    rewards = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    for scale in ("group", "batch", "none"):
        found = grpo.advantages(rewards, scale=scale, std_floor=0.02)
        assert found.sum(1).abs().max() < 1e-5
        assert torch.allclose(found, grpo.advantages(rewards + 1, scale=scale, std_floor=0.02), atol=1e-4)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match=r"groups of 1 have no baseline; rl\.group must be at least 2"):
        grpo.advantages(torch.zeros(3, 1), scale="group", std_floor=0.02)


# The clipped loss


def test_the_gradient_on_policy_is_minus_the_advantage_over_the_number_of_actions():
    advantage = torch.tensor([1.0, -2.0, 0.5, 0.0])
    loss, gradient = on_policy(advantage)
    assert gradient.tolist() == [-0.25, 0.5, -0.125, 0.0]
    assert loss.item() == pytest.approx(0.5 / 4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),  # likelier already: no more to gain above 1.28
        (1.5, -1.0, 1.5, 1.5),  # likelier and bad: pulled back in full
        (0.5, -1.0, 0.8, 0.0),  # rarer already: no more to gain below 0.8
        (0.5, 1.0, -0.5, -0.5),  # rarer and good: pulled back in full
        (1.1, 1.0, -1.1, -1.1),
        (0.9, -1.0, 0.9, 0.9),
    ],
)
def test_the_ratio_is_clipped_on_the_side_where_more_would_be_gained(ratio: float, advantage: float, loss: float, gradient: float):
    logps = torch.tensor([math.log(ratio)]).requires_grad_()
    found, metrics = grpo.clipped_loss(logps, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert logps.grad is not None
    assert logps.grad.item() == pytest.approx(gradient)
    assert metrics["ratio"] == pytest.approx(ratio)
    assert metrics["clip_low"] == float(ratio == 0.5 and advantage < 0)
    assert metrics["clip_high"] == float(ratio == 1.5 and advantage > 0)


def test_an_extreme_ratio_stays_finite():
    logps = torch.tensor([500.0, -500.0]).requires_grad_()
    loss, _ = grpo.clipped_loss(logps, torch.zeros(2), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert loss.isfinite()
    assert logps.grad is not None
    assert logps.grad.isfinite().all()


def test_no_actions_cost_nothing():
    empty = torch.zeros(0, requires_grad=True)
    assert grpo.clipped_loss(empty, empty.detach(), empty.detach(), clip_low=0.2, clip_high=0.28)[0].item() == 0
    assert grpo.token_kl(empty, empty.detach())[0].item() == 0


def test_the_loss_and_its_gradient_are_trls():
    """TRL's GRPOTrainer on the same numbers, loss type bnpo: mean over all tokens of the batch, clip 0.2 / 0.28."""
    trl = pytest.importorskip("trl")
    generator = torch.Generator().manual_seed(0)
    now, before, reference = (torch.randn(3, 5, generator=generator) * 0.3 - 1 for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    advantage = torch.tensor([1.0, -0.5, 0.3])
    logps = now.clone().requires_grad_()
    kept = mask.bool()
    loss, _ = grpo.clipped_loss(logps[kept], before[kept], advantage[:, None].expand(-1, 5)[kept], clip_low=0.2, clip_high=0.28)
    loss.backward()
    _, kl = grpo.token_kl(now[kept], reference[kept])

    theirs, logged = now.clone().requires_grad_(), {"train": defaultdict(list)}
    accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None),
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        loss_type="bnpo",
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        use_vllm=False,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        accelerator=accelerator,
        _metrics=logged,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *a, **k: (theirs, torch.zeros_like(now), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(3, 1, dtype=torch.long), "prompt_mask": torch.ones(3, 1, dtype=torch.long),
        "completion_ids": torch.zeros(3, 5, dtype=torch.long), "completion_mask": mask, "advantages": advantage,
        "old_per_token_logps": before, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    expected = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(logps.grad, theirs.grad, atol=1e-7)  # type: ignore[arg-type]
    d = (reference - now)[kept]
    assert kl == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-5)


# KL


def test_the_expected_gradient_of_the_kl_term_is_the_reverse_kls_and_its_value_the_kl():
    """Exact: the expectation over all 5 outcomes of a categorical, weighted by the policy's own probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64)
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)

    free = logits.clone().requires_grad_()
    logp = free.log_softmax(0)
    true = (logp.exp() * (logp - reference)).sum()
    true.backward()

    expected, value = torch.zeros(5, dtype=torch.float64), 0.0
    for outcome in range(5):
        own = logits.clone().requires_grad_()
        chosen = own.log_softmax(0)[outcome : outcome + 1]
        term, k3 = grpo.token_kl(chosen, reference[outcome : outcome + 1])
        term.backward()
        p = float(logits.log_softmax(0)[outcome].exp())
        expected += p * own.grad  # type: ignore[operator]
        value += p * k3
        assert k3 >= 0
    assert torch.allclose(expected, free.grad, atol=1e-12)  # type: ignore[arg-type]
    assert value == pytest.approx(true.item(), abs=1e-9)


def test_the_kl_of_a_policy_with_itself_is_zero_without_gradient():
    logps = torch.tensor([-1.0, -2.0]).requires_grad_()
    term, k3 = grpo.token_kl(logps, logps.detach())
    term.backward()
    assert (term.item(), k3) == (0.0, 0.0)
    assert logps.grad is not None
    assert logps.grad.tolist() == [0.0, 0.0]


# What is logged


def test_groups_without_spread_are_counted():
    assert grpo.zero_spread(torch.tensor([[1.0, 1.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.1]])) == 0.5


def test_pairwise_iou_by_hand():
    """Two rows of four pixels: 2 of 4 common = .5; a group of empty masks 1. Mean .75."""
    masks = torch.zeros(2, 2, 1, 4, dtype=torch.bool)
    masks[0, 0, 0, :] = True
    masks[0, 1, 0, :2] = True
    assert grpo.pairwise_iou(masks) == pytest.approx(0.75)


def test_the_exact_kl_is_that_of_torchs_distributions_and_pulls_back_to_the_reference():
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(5, 7, generator=generator) for _ in range(2))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=policy), torch.distributions.Categorical(logits=reference)
    ).sum()
    assert float(grpo.exact_kl(policy, reference)) == pytest.approx(float(expected), rel=1e-5)
    assert float(grpo.exact_kl(policy, policy + 3.0)) == pytest.approx(0.0, abs=1e-5)
    moved = policy.clone().requires_grad_()
    for _ in range(200):
        loss = grpo.exact_kl(moved, reference)
        (gradient,) = torch.autograd.grad(loss, moved)
        moved = (moved - 0.5 * gradient).detach().requires_grad_()
    assert grpo.exact_kl(moved, reference) < 0.01 * expected
