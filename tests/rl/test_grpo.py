from __future__ import annotations

import math
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from ans_core.rl import grpo


def on_policy(advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logps = torch.randn(len(advantage), generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss, _ = clipped(logps, logps.detach(), advantage)
    loss.backward()
    assert logps.grad is not None
    return loss.detach(), logps.grad


def objective(form: grpo.Form = "dapo", max_tokens: int = 8) -> grpo.Objective:
    return grpo.Objective(form=form, clip_low=0.2, clip_high=0.28, max_tokens=max_tokens)


def clipped(
    logps: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """Every token an answer of its own."""
    return grpo.policy_loss(
        logps, behaviour, advantage, torch.arange(len(logps)), objective(), answers=len(logps)
    )


# Advantages


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["group", "within", "none"])
def test_equal_rewards_teach_exactly_nothing(scale: grpo.Scale):
    """0.1 * 3 / 3 is not 0.1 in floats: a mean can be off by an ulp, which a small floor would blow up."""
    for value in (
        0.1,
        1 / 3,
        0.7,
        1e-8,
        123.456,
        *torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist(),
    ):
        for group in range(2, 18):
            found = grpo.advantages(torch.full((2, group), value), scale=scale, std_floor=1e-12)
            assert found.count_nonzero() == 0


def test_advantages_by_hand():
    """Group 0: 0, 1 -> centred -.5, .5, unbiased variance .5. Group 1: 0, 3 -> -1.5, 1.5, variance 4.5.

    Within groups: (2 * .25 + 2 * 2.25) / (4 - 2) = 2.5. Of all: mean 1, (1 + 0 + 1 + 4) / 3 = 2.
    """
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])

    def found(scale: grpo.Scale) -> list[list[float]]:
        return [
            [pytest.approx(v) for v in row]
            for row in grpo.advantages(rewards, scale=scale, std_floor=0.02).tolist()
        ]

    half = math.sqrt(0.5)
    assert found("none") == [[-0.5, 0.5], [-1.5, 1.5]]
    assert found("group") == [[-half, half], [-half, half]]
    assert found("within") == [
        [-0.5 / math.sqrt(2.5), 0.5 / math.sqrt(2.5)],
        [-1.5 / math.sqrt(2.5), 1.5 / math.sqrt(2.5)],
    ]
    assert found("batch") == [[-0.5 * half, 0.5 * half], [-1.5 * half, 1.5 * half]]


def test_the_floor_keeps_a_small_difference_small():
    rewards = torch.tensor([[0.500, 0.504]])
    for scale in ("group", "within", "batch"):
        assert grpo.advantages(rewards, scale=scale, std_floor=0.02).tolist()[0] == pytest.approx(
            [-0.1, 0.1], rel=1e-3
        )


@pytest.mark.parametrize("scale", ["group", "within", "none"])
def test_a_failed_reward_is_left_out_of_the_baseline(scale: grpo.Scale):
    """1, NaN, 3: mean 2, variance 2 (of two); the failed one has advantage 0. A group of failures, or of one
    known, teaches nothing."""
    nan = math.nan
    rewards = torch.tensor([[1.0, nan, 3.0], [nan, nan, nan], [nan, 5.0, nan]])
    found = grpo.advantages(rewards, scale=scale, std_floor=0.02)
    one = 1.0 if scale == "none" else math.sqrt(0.5)
    assert found[0].tolist() == pytest.approx([-one, 0.0, one])
    assert found[1:].count_nonzero() == 0


@pytest.mark.parametrize("combine", get_args(grpo.Combine))
@pytest.mark.parametrize("scale", get_args(grpo.Scale))
def test_the_advantages_of_two_processes_are_those_of_one(combine: grpo.Combine, scale: grpo.Scale):
    """Each knows its own groups and the sums of all: two threads that wait for each other."""
    rewards = torch.rand(4, 5, generator=torch.Generator().manual_seed(3))
    rewards[0, 2] = math.nan
    parts = {"a": rewards, "b": rewards.flip(0) ** 2}
    meeting, given = threading.Barrier(2, timeout=30), {}

    def of(rows: slice, total: grpo.Total) -> torch.Tensor:
        own = {name: values[rows] for name, values in parts.items()}
        return grpo.advantages_of_parts(
            own, {"a": 1.0, "b": 0.5}, combine=combine, scale=scale, std_floor=0.02, total=total
        )

    def process(rank: int) -> torch.Tensor:
        def total(values: torch.Tensor) -> torch.Tensor:
            given[rank] = values
            meeting.wait()
            summed = given[0] + given[1]
            meeting.wait()
            return summed

        return of(slice(2 * rank, 2 * rank + 2), total)

    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(process, (0, 1)))
    assert torch.allclose(torch.cat(halves), of(slice(None), lambda values: values), atol=1e-6)


def test_advantages_of_a_group_sum_to_zero_and_do_not_see_a_shift():
    rewards = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    for scale in ("group", "within", "batch", "none"):
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
def test_the_ratio_is_clipped_on_the_side_where_more_would_be_gained(
    ratio: float, advantage: float, loss: float, gradient: float
):
    logps = torch.tensor([math.log(ratio)]).requires_grad_()
    found, metrics = clipped(logps, torch.zeros(1), torch.tensor([advantage]))
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert logps.grad is not None
    assert logps.grad.item() == pytest.approx(gradient)
    assert metrics["ratio"] == pytest.approx(ratio)
    assert metrics["clip_low"] == float(ratio == 0.5 and advantage < 0)
    assert metrics["clip_high"] == float(ratio == 1.5 and advantage > 0)


def test_an_extreme_ratio_stays_finite():
    logps = torch.tensor([500.0, -500.0]).requires_grad_()
    loss, _ = clipped(logps, torch.zeros(2), torch.tensor([-1.0, 1.0]))
    loss.backward()
    assert loss.isfinite()
    assert logps.grad is not None
    assert logps.grad.isfinite().all()


def test_no_actions_cost_nothing():
    empty = torch.zeros(0, requires_grad=True)
    assert clipped(empty, empty.detach(), empty.detach())[0].item() == 0
    assert grpo.token_kl(empty, empty.detach())[0].item() == 0


# Against TRL


def trls(
    now: torch.Tensor, before: torch.Tensor, mask: torch.Tensor, advantage: torch.Tensor, **settings: object
) -> torch.Tensor:
    """The loss of TRL's own GRPOTrainer on these log-probabilities (B, T)."""
    trl = pytest.importorskip("trl")
    accelerator = SimpleNamespace(
        gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=settings.pop("epsilon_high", 0.28),
        importance_sampling_level="token",
        max_completion_length=8,
        top_entropy_quantile=1.0,
        use_vllm=False,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        accelerator=accelerator,
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *a, **k: (now, torch.zeros_like(now), None),
    )
    vars(trainer).update(settings)
    inputs = {
        "prompt_ids": torch.zeros(3, 1, dtype=torch.long), "prompt_mask": torch.ones(3, 1, dtype=torch.long),
        "completion_ids": torch.zeros(3, 5, dtype=torch.long), "completion_mask": mask,
        "advantages": advantage, "old_per_token_logps": before, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    found = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", get_args(grpo.Form))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_forms_loss_and_gradient_are_trls(form: grpo.Form, seed: int):
    generator = torch.Generator().manual_seed(seed)
    now, before = (torch.randn(3, 5, generator=generator) * 0.3 - 1 for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    advantage, kept = torch.tensor([1.0, -0.5, 0.3]), mask.bool()
    ours, theirs = now.clone().requires_grad_(), now.clone().requires_grad_()
    answer = torch.arange(3)[:, None].expand(-1, 5)[kept]
    loss, _ = grpo.policy_loss(
        ours[kept], before[kept], advantage[answer], answer, objective(form), answers=3
    )
    loss.backward()
    settings = {
        "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},  # its bound is the ratio's own
    }.get(form, {"loss_type": form})
    expected = trls(theirs, before, mask, advantage, **settings)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad.abs().max() > 0
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        ("dapo", -1.4 / 3),
        ("bnpo", -1.4 / 3),
        ("grpo", -0.2),
        ("dr_grpo", -1.4 / 16),
        ("gspo", -0.2),
        ("cispo", 1.2 / 3),
    ],
)
def test_forms_by_hand(form: grpo.Form, loss: float):
    """An answer of two tokens with advantage 1 and one of one token with -0.6, on policy: the ratio is 1, so
    a token's term is minus its advantage: -1, -1, 0.6. Sum -1.4; mean of the answers' means (-1 + 0.6) / 2;
    dr_grpo: 2 answers x 8 tokens. cispo's terms are minus advantage times log-probability: 1, 2, -1.8."""
    logps = torch.tensor([-1.0, -2.0, -3.0])
    found, _ = grpo.policy_loss(
        logps, logps, torch.tensor([1.0, 1.0, -0.6]), torch.tensor([0, 0, 1]), objective(form), answers=2
    )
    assert found.item() == pytest.approx(loss)


@pytest.mark.parametrize("form", ["dapo", "grpo", "dr_grpo", "gspo", "cispo"])
def test_the_losses_of_a_steps_parts_add_up_to_the_whole(form: grpo.Form):
    """Two answers of 1 and 2 tokens, apart and together; the tokens of a step are 3, not 1.5 for each of two
    parts."""
    logps, advantage = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.0, -0.25, -0.25])
    whole, _ = grpo.policy_loss(
        logps, logps - 0.1, advantage, torch.tensor([0, 1, 1]), objective(form), answers=2
    )
    totals = grpo.Totals(samples=1.0, answers=2.0, tokens=3.0, micro_batches=2.0)
    old, of_step = logps - 0.1, {"answers": 1, "totals": totals}
    first, of_first = grpo.policy_loss(
        logps[:1], old[:1], advantage[:1], torch.tensor([0]), objective(form), **of_step
    )
    rest, of_rest = grpo.policy_loss(
        logps[1:], old[1:], advantage[1:], torch.tensor([0, 0]), objective(form), **of_step
    )
    assert (first + rest).item() == pytest.approx(whole.item())
    # as the loop averages metrics over micro-batches
    curve = (of_first["policy_loss"] + of_rest["policy_loss"]) / 2
    assert curve == pytest.approx(whole.item())


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "theirs"), [("group", "group"), ("batch", "batch"), ("none", "none")])
def test_advantages_are_trls(scale: grpo.Scale, theirs: str):
    """TRL's lines for sum_then_normalize (nanmean, unbiased nanstd, + 1e-4), here over its own helper."""
    pytest.importorskip("trl")
    from trl.trainer.utils import nanstd

    rewards = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    rewards[1, 2] = math.nan
    std = nanstd(rewards, dim=1)[:, None] if theirs != "batch" else nanstd(rewards.flatten())
    expected = rewards - rewards.nanmean(1, keepdim=True)
    if theirs != "none":
        expected = expected / (std + 1e-4)
    found = grpo.advantages(rewards, scale=scale, std_floor=1e-4)
    assert torch.allclose(found, expected.nan_to_num(0.0), rtol=1e-3, atol=1e-6)


def test_parts_made_equal_before_they_are_summed_are_trls():
    """normalize_then_sum: each part by its group, the weighted sum by the batch."""
    pytest.importorskip("trl")
    from trl.trainer.utils import nanstd

    generator = torch.Generator().manual_seed(0)
    parts = {"a": torch.rand(4, 6, generator=generator), "b": 100 * torch.rand(4, 6, generator=generator)}
    each = [(v - v.nanmean(1, keepdim=True)) / (nanstd(v, dim=1)[:, None] + 1e-4) for v in parts.values()]
    summed = each[0] + 0.5 * each[1]
    expected = (summed - summed.mean()) / (nanstd(summed.flatten()) + 1e-4)
    found = grpo.advantages_of_parts(
        parts, {"a": 1.0, "b": 0.5}, combine="normalise_then_sum", scale="group", std_floor=1e-4
    )
    assert torch.allclose(found, expected, rtol=2e-3, atol=1e-4)
    plain = grpo.advantages_of_parts(
        parts, {"a": 1.0, "b": 0.5}, combine="sum_then_normalise", scale="group", std_floor=1e-4
    )
    # the large part drowns the other
    assert (plain - grpo.advantages(parts["b"], scale="group", std_floor=1e-4)).abs().max() < 0.2
    assert (found - plain).abs().max() > 0.5


def test_a_group_whose_parts_are_all_equal_teaches_exactly_nothing_in_either_order():
    parts = {
        "a": torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.2, 0.3]]),
        "b": torch.tensor([[0.7, 0.7, 0.7], [0.3, 0.1, 0.7]]),
    }
    for combine in ("sum_then_normalise", "normalise_then_sum"):
        found = grpo.advantages_of_parts(
            parts, {"a": 1.0, "b": 1.0}, combine=combine, scale="group", std_floor=0.02
        )
        assert found[0].count_nonzero() == 0
        assert found[1].count_nonzero() == 3


def test_a_rollout_with_a_failed_part_is_left_out():
    parts = {"a": torch.tensor([[0.0, 1.0, 2.0]]), "b": torch.tensor([[0.0, math.nan, 0.0]])}
    found = grpo.advantages_of_parts(
        parts, {"a": 1.0, "b": 1.0}, combine="sum_then_normalise", scale="none", std_floor=0.02
    )
    assert found.tolist() == [[-1.0, 0.0, 1.0]]
    parts = {"a": torch.tensor([[1.0, 9.0, 2.0]]), "b": torch.tensor([[1.0, math.nan, 2.0]])}
    found = grpo.advantages_of_parts(
        parts, {"a": 1.0, "b": 1.0}, combine="normalise_then_sum", scale="group", std_floor=0.02
    )
    assert found.tolist() == [[pytest.approx(-(0.5**0.5)), 0.0, pytest.approx(0.5**0.5)]]


def test_groups_with_the_widest_spread_are_learned_from_first():
    rewards = torch.tensor(
        [
            [1.0, 1.0, 1.0],
            [5.0, 5.1, 5.1],
            [math.nan, 2.0, 2.0],
            [0.0, 1.0, 0.0],
            [3.0, math.nan, 0.0],
            [math.nan] * 3,
        ]
    )
    assert grpo.zero_spread(rewards) == 0.5
    assert [grpo.most_telling(rewards, count).tolist() for count in (1, 2, 3)] == [[4], [3, 4], [1, 3, 4]]
    assert grpo.most_telling(rewards, 4).tolist() == [0, 1, 3, 4]  # of groups that teach nothing the first
    assert grpo.most_telling(rewards, 6).tolist() == list(range(6))


# KL


def test_the_expected_gradient_of_the_kl_term_is_the_reverse_kls_and_its_value_the_kl():
    """Exact: the expectation over all 5 outcomes of a categorical, weighted by the policy's own
    probabilities."""
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
    """Two rows of four pixels: 2 of 4 common = .5; a group of empty masks 1."""
    masks = torch.zeros(2, 2, 1, 4, dtype=torch.bool)
    masks[0, 0, 0, :] = True
    masks[0, 1, 0, :2] = True
    assert grpo.group_overlap(masks).tolist() == [0.5, 1.0]


def test_pairwise_iou_counts_pixels_exactly_under_autocast():
    """Areas that bf16 does not hold: 1001 of 64 x 64 pixels, and one less."""
    masks = torch.zeros(2, 3, 64, 64, dtype=torch.bool)
    masks.flatten(2)[:, :, :1001] = True
    masks[1, 0, 0, 0] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = grpo.group_overlap(masks)
    assert found[0] == 1.0
    assert found[1].item() == pytest.approx((1 + 2 * 1000 / 1001) / 3)


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
