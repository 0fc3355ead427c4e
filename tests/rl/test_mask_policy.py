from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ans_core.rl import grpo, mask_policy
from ans_core.rl.mask_policy import (
    MASK_POLICIES,
    GridGaussian,
    MaskActions,
    MaskPolicy,
    MaskSampling,
    PolicyOutput,
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


def clicked(at: Tensor) -> Tensor:
    """Any embedding of a click."""
    return torch.cat([3 * at - 1.5, torch.ones(len(at), 6)], dim=1)


def drawn(z: Tensor, embeddings: Tensor | None = None) -> PolicyOutput:
    generator = torch.Generator().manual_seed(9)
    if embeddings is None:
        embeddings = torch.randn(len(z), 8, generator=generator)
    choices = torch.stack([z, z.roll(2, 1), -z], dim=1)
    ious = 0.3 * torch.randn(len(z), 3, generator=generator)
    return PolicyOutput(
        embeddings=embeddings,
        logits=z,
        choices=choices,
        ious=ious,
        words=-torch.rand(len(z), generator=generator),
    )


def how(
    width: float, scale: float, generators: list[torch.Generator], group: int, decode: Decoder
) -> MaskSampling:
    return MaskSampling(
        width=width, scale=scale, generators=generators, group=group, decode=decode, click=clicked
    )


def act(
    policy: MaskPolicy,
    what: PolicyOutput,
    *,
    group: int = 4,
    width: float = 0.5,
    scale: float = 2.0,
    seed: int = 0,
) -> MaskActions:
    side = what.logits.shape[-1]
    return policy.act(what, how(width, scale, generators(seed, len(what.logits)), group, decoder(side)))


def grid(cells: int = 4) -> MaskPolicy:
    return GridGaussian(cells)


@pytest.fixture(params=list(MASK_POLICIES))
def policy(request: pytest.FixtureRequest) -> MaskPolicy:
    return MASK_POLICIES[request.param](4)


# Of every policy


def test_actions_follow_the_generators_of_their_samples(policy: MaskPolicy):
    what = drawn(logits())
    one, again, other = act(policy, what), act(policy, what), act(policy, what, seed=1)
    assert torch.equal(one.choice, again.choice)
    assert torch.equal(one.masks, again.masks)
    assert torch.equal(one.choice, other.choice) != policy.explores
    second = PolicyOutput(**{name: value[1:] for name, value in vars(what).items()})
    alone = policy.act(second, how(0.5, 2.0, generators(0, 2)[1:], 4, decoder()))
    assert torch.equal(alone.masks[0], one.masks[1])


def test_the_log_prob_of_a_stored_action_draws_nothing_anew(policy: MaskPolicy):
    what = drawn(logits())
    actions = act(policy, what)
    kept = actions.choice.clone()
    torch.manual_seed(0)
    one = policy.log_prob(what, actions)
    torch.manual_seed(1)
    assert torch.equal(one, policy.log_prob(what, actions))
    assert torch.equal(actions.choice, kept)
    assert one.shape == (2, 4)


def test_the_ratio_is_one_at_first_and_the_kl_exactly_zero(policy: MaskPolicy):
    free = {name: value.clone().requires_grad_() for name, value in vars(drawn(logits())).items()}
    what, fixed = PolicyOutput(**free), PolicyOutput(**{name: value.detach() for name, value in free.items()})
    actions = act(policy, fixed)
    logps = policy.log_prob(what, actions).flatten()
    objective = grpo.Objective(form="dapo", clip_low=0.2, clip_high=0.28, max_tokens=1)
    _, metrics = grpo.policy_loss(logps, logps.detach(), torch.ones(8), torch.arange(8), objective, answers=8)
    assert metrics["ratio"] == 1.0
    kl = policy.kl(what, fixed, actions)
    kl.backward()
    assert kl.item() == 0
    assert all(value.grad is None or value.grad.abs().max() < 1e-7 for value in free.values())


def test_confidence_is_the_mean_probability_of_what_is_drawn(policy: MaskPolicy):
    actions = act(policy, drawn(logits()))
    assert (
        actions.confidence > 0.5 if not isinstance(policy, mask_policy.Bernoulli) else actions.confidence > 0
    ).all()
    assert (actions.confidence <= 1).all()
    empty = act(policy, drawn(torch.full((1, 16, 16), -50.0)), scale=1e-6)
    nothing = ~empty.masks.flatten(2).any(2)
    assert (empty.confidence[nothing] == 0).all()


# grid_gaussian


def test_the_mean_of_the_policy_is_the_logits_pooled_over_cells():
    z = torch.arange(16.0).view(1, 4, 4)
    assert GridGaussian(2).mean(drawn(z))[0].tolist() == [[2.5, 4.5], [10.5, 12.5]]


def test_actions_lie_around_the_mean_in_units_of_the_scale():
    what = drawn(logits())
    many = act(grid(), what, group=4000)
    mean = GridGaussian(4).mean(what) / 2.0
    assert (many.choice.mean(1) - mean).abs().max() < 5 * 0.5 / math.sqrt(4000)
    assert many.choice.std(1).mean().item() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("name", ["grid_gaussian", "bernoulli"])
def test_without_noise_the_mask_is_the_thresholded_logits(name: str):
    what = drawn(logits())
    found = act(MASK_POLICIES[name](4), what, width=1e-9).masks
    assert torch.equal(found, (what.logits > 0)[:, None].expand_as(found))


def test_log_prob_by_hand():
    """One cell, u = 1, mean 0, width 1/2: -1 / (2 / 4) = -2. The second action sits on the mean: 0."""
    actions = MaskActions(
        choice=torch.tensor([[[[1.0]], [[0.0]]]]),
        masks=torch.zeros(1, 2, 2, 2, dtype=torch.bool),
        confidence=torch.zeros(1, 2),
        scale=1.0,
        width=0.5,
    )
    assert grid(1).log_prob(drawn(torch.zeros(1, 2, 2)), actions).tolist() == [[-2.0, 0.0]]
    assert grid(1).log_prob(drawn(torch.full((1, 2, 2), 1.0)), actions).tolist() == [[0.0, -2.0]]


def test_the_kl_is_that_of_the_gaussians_per_number():
    one, other = drawn(logits()), drawn(logits() + 0.3)
    actions = act(grid(), one)
    gaussians = [torch.distributions.Normal(GridGaussian(4).mean(d) / 2.0, 0.5) for d in (one, other)]
    expected = torch.distributions.kl_divergence(*gaussians).mean().item()
    assert grid().kl(one, other, actions).item() == pytest.approx(expected, rel=1e-5)


# The others, against torch's distributions


def test_bernoullis_log_prob_and_kl_are_those_of_the_pixels():
    one, other, policy = drawn(logits()), drawn(logits(seed=6)), MASK_POLICIES["bernoulli"](4)
    actions = act(policy, one, width=2.0)
    pixels, fixed = (torch.distributions.Bernoulli(logits=d.logits / 2.0) for d in (one, other))
    expected = pixels.log_prob(actions.masks.float().transpose(0, 1)).transpose(0, 1).mean((2, 3))
    assert torch.allclose(policy.log_prob(one, actions), expected, atol=1e-6)
    assert policy.kl(one, other, actions).item() == pytest.approx(
        torch.distributions.kl_divergence(pixels, fixed).mean().item(), rel=1e-4
    )
    assert act(policy, one, width=2.0, group=4000).masks.float().mean(1).sub(
        pixels.probs
    ).abs().max() < 5 * 0.5 / math.sqrt(4000)


def test_multimasks_log_prob_and_kl_are_those_of_the_choice():
    one, policy = drawn(logits()), MASK_POLICIES["multimask"](4)
    other = PolicyOutput(**{**vars(one), "ious": one.ious.flip(1)})
    actions = act(policy, one, group=6000)
    choice, fixed = (torch.distributions.Categorical(logits=d.ious / 0.5) for d in (one, other))
    assert torch.allclose(policy.log_prob(one, actions), choice.log_prob(actions.choice.T).T, atol=1e-6)
    assert policy.kl(one, other, actions).item() == pytest.approx(
        torch.distributions.kl_divergence(choice, fixed).mean().item(), rel=1e-5
    )
    for sample in range(2):
        for mask in range(3):
            here = actions.choice[sample] == mask
            assert abs(here.float().mean() - choice.probs[sample, mask]) < 5 * 0.5 / math.sqrt(6000)
            assert torch.equal(actions.masks[sample][here][0], one.choices[sample, mask] > 0)


def quarter(embeddings: Tensor) -> Tensor:
    """A picture of four things: a click draws the quarter that it lies in."""
    x, y = ((embeddings[:, i] + 1.5) / 3 > 0.5 for i in (0, 1))
    places = torch.arange(12) >= 6
    return (
        4.0 * ((places[None, None] == x[:, None, None]) & (places[None, :, None] == y[:, None, None])).float()
        - 2
    )


def first_quarter(batch: int = 1) -> Tensor:
    """Logits of the first of four things, with some of every other."""
    noise = torch.randn(batch, 12, 12, generator=torch.Generator().manual_seed(3)).abs()
    z = -noise
    z[:, :6, :6] += 2 * noise[:, :6, :6]
    return z


def test_a_click_on_another_thing_draws_it_and_one_on_the_same_leaves_the_mask():
    z, policy = first_quarter(2), mask_policy.Place()
    z[:, 0, 0] = -0.1  # the mask is not quite the thing
    actions = policy.act(drawn(z), how(3.0, 1.0, generators(0, 2), 400, quarter))
    rows, columns = actions.choice // 12, actions.choice % 12
    for row, column, mask in zip(rows[1].tolist(), columns[1].tolist(), actions.masks[1], strict=True):
        same = row < 6 and column < 6
        at = torch.tensor([[(column + 0.5) / 12, (row + 0.5) / 12]])
        assert torch.equal(mask, z[1] > 0 if same else quarter(clicked(at))[0] > 0)
    assert actions.masks.flatten(2)[1].unique(dim=0, return_counts=True)[1].min() > 20  # all four


def test_a_things_probability_is_that_of_a_click_in_it():
    what, policy = drawn(first_quarter()), mask_policy.Place()
    actions = policy.act(what, how(2.0, 1.0, generators(0, 1), 20_000, quarter))
    pixels = (
        (what.logits.flatten(1) / what.logits.flatten(1).std(1, correction=0, keepdim=True) / 2.0)
        .softmax(1)
        .view(1, 12, 12)
    )
    found = policy.log_prob(what, actions).exp()
    for quarters in (pixels[:, :6, :6], pixels[:, :6, 6:], pixels[:, 6:, :6], pixels[:, 6:, 6:]):
        drew = (found - quarters.sum()).abs() < 1e-4
        assert drew.float().mean().item() == pytest.approx(
            quarters.sum().item(), abs=5 * 0.5 / math.sqrt(20_000)
        )
    other = drawn(first_quarter().flip(1))
    fixed = torch.distributions.Categorical(logits=policy.log_probs(other.logits, 2.0))
    own = torch.distributions.Categorical(logits=policy.log_probs(what.logits, 2.0))
    assert policy.kl(what, other, actions).item() == pytest.approx(
        torch.distributions.kl_divergence(own, fixed).mean().item(), rel=1e-4
    )


def test_pixels_are_numbered_row_by_row():
    assert mask_policy.middles(torch.tensor([[0, 7, 9]]), (4, 4)).tolist() == [
        [[0.125, 0.125], [0.875, 0.375], [0.375, 0.625]]
    ]
    assert mask_policy.middles(torch.tensor([[7]]), (2, 4)).tolist() == [[[0.875, 0.75]]]


def test_seg_gaussians_masks_are_what_the_noisy_embeddings_draw():
    what, policy = drawn(logits()), MASK_POLICIES["seg_gaussian"](4)
    actions = act(policy, what)
    assert torch.equal(actions.masks[1, 2], decoder()(2.0 * actions.choice[1, 2][None])[0] > 0)
    far = PolicyOutput(**{**vars(what), "logits": logits(seed=8)})
    # the decoder is the environment
    assert torch.equal(policy.log_prob(what, actions), policy.log_prob(far, actions))


def test_the_token_policy_draws_one_mask_for_all():
    what, policy = drawn(logits()), MASK_POLICIES["token"](4)
    actions = act(policy, what)
    assert grpo.group_overlap(actions.masks).tolist() == [1.0, 1.0]
    assert policy.log_prob(what, actions)[:, 3].tolist() == what.words.tolist()


# The gradient


def reward(masks: Tensor, target: Tensor) -> Tensor:
    both, either = (masks & target).flatten(2).sum(2), (masks | target).flatten(2).sum(2)
    return both / either.clamp(min=1)


def estimated(
    policy: MaskPolicy,
    what: PolicyOutput,
    own: Tensor,
    target: Tensor,
    *,
    group: int,
    width: float,
    decode: Decoder,
    seed: int = 0,
) -> Tensor:
    """The gradient of the expected reward with respect to `own`, by GRPO's loss."""
    fixed = PolicyOutput(**{name: value.detach() for name, value in vars(what).items()})
    actions = policy.act(fixed, how(width, 1.0, generators(seed, 1), group, decode))
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


@pytest.mark.parametrize(("name", "steepness"), [("grid_gaussian", None), ("bernoulli", 0.8)])
def test_the_policy_gradient_points_along_the_gradient_of_the_expected_reward(
    name: str, steepness: float | None
):
    """3 x 3 masks of 3 x 3 cells, so every mask has a known probability: the expectation of IoU over all 512
    is differentiated exactly."""
    z = 0.5 * torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(2))
    free, own = z.clone().requires_grad_(), z.clone().requires_grad_()
    every = torch.cartesian_prod(*[torch.tensor([False, True])] * 9).view(1, 512, 3, 3)
    on = (
        torch.distributions.Normal(0.0, 1.0).cdf(free / 0.8)
        if steepness is None
        else (free / steepness).sigmoid()
    )
    probability = torch.where(every, on[:, None], 1 - on[:, None]).flatten(2).prod(2)
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)
    (probability * reward(every, corner(3))).sum().backward()
    found = estimated(
        MASK_POLICIES[name](3), drawn(own), own, corner(3), group=20_000, width=0.8, decode=decoder(3)
    )
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
                reward(
                    act(grid(3), drawn(z + s * wide), group=4000, scale=1.0, width=0.8).masks, target
                ).mean()
                for s in (1, -1)
            )
            true[row, column] = (up - down) / (2 * step)
    own = z.clone().requires_grad_()
    found = F.avg_pool2d(
        estimated(grid(3), drawn(own), own, target, group=4000, width=0.8, decode=decoder(12))[:, None], 4
    )
    assert F.cosine_similarity(found.flatten(), true.flatten(), dim=0) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grid_gaussian", "seg_gaussian"])
def test_the_policy_gradient_reaches_an_embedding_through_a_tiny_decoder(name: str):
    """Against finite differences of the mean reward of many masks under the same noise, number by number of
    the embedding. grid_gaussian acts on the pooled logits alone: what lies within a cell stays as it was when
    the policy acted."""
    decode, target, count, step, policy = decoder(12), corner(12), 40_000, 0.05, MASK_POLICIES[name](3)
    start = 0.5 * torch.randn(1, 8, generator=torch.Generator().manual_seed(4))
    before = decode(start)

    def expected(at: Tensor) -> float:
        moved = F.adaptive_avg_pool2d(decode(at) - before, 3)[:, None]
        z = before + F.interpolate(moved, size=(12, 12), mode="bilinear", align_corners=False)[:, 0]
        actions = policy.act(drawn(z, at), how(0.3, 1.0, generators(1, 1), count, decode))
        return reward(actions.masks, target).mean().item()

    shift = step * torch.eye(8)[:, None]
    true = torch.tensor([(expected(start + s) - expected(start - s)) / (2 * step) for s in shift])
    own = start.clone().requires_grad_()
    found = estimated(
        policy, drawn(decode(own), own), own, target, group=count, width=0.3, decode=decode, seed=1
    )
    assert F.cosine_similarity(found.flatten(), true, dim=0) > 0.95


def test_multimasks_gradient_is_that_of_the_expected_reward():
    """Three masks: the expectation is exact."""
    policy, what = MASK_POLICIES["multimask"](3), drawn(logits(batch=1, size=12))
    free, own = what.ious.clone().requires_grad_(), what.ious.clone().requires_grad_()
    ((free / 0.5).softmax(1) * reward(what.choices > 0, corner(12))).sum().backward()
    found = estimated(
        policy,
        PolicyOutput(**{**vars(what), "ious": own}),
        own,
        corner(12),
        group=20_000,
        width=0.5,
        decode=decoder(12),
    )
    assert free.grad is not None
    assert torch.allclose(found, free.grad, atol=0.05 * free.grad.abs().max().item())


def test_the_gradient_of_things_is_that_of_the_expected_reward():
    """Four things: the expectation is exact."""
    policy, z = mask_policy.Place(), first_quarter()
    free, own = z.clone().requires_grad_(), z.clone().requires_grad_()
    every = torch.stack(
        [
            z[0] > 0,
            *(
                quarter(clicked(torch.tensor([[x, y]])))[0] > 0
                for y, x in ((0.2, 0.8), (0.8, 0.2), (0.8, 0.8))
            ),
        ]
    )
    inside = (policy.log_probs(free, 2.0).exp().view(1, 1, 12, 12) * every).sum((2, 3))
    (inside * reward(every[None], corner(12))).sum().backward()
    found = estimated(policy, drawn(own), own, corner(12), group=20_000, width=2.0, decode=quarter)
    assert free.grad is not None
    assert F.cosine_similarity(found.flatten(), free.grad.flatten(), dim=0) > 0.95
    assert found.norm().item() == pytest.approx(free.grad.norm().item(), rel=0.1)


def test_the_token_policy_has_exactly_no_gradient():
    what = drawn(logits(batch=1))
    own = what.words.clone().requires_grad_()
    found = estimated(
        MASK_POLICIES["token"](4),
        PolicyOutput(**{**vars(what), "words": own}),
        own,
        corner(16),
        group=50,
        width=0.5,
        decode=decoder(),
    )
    assert found.count_nonzero() == 0


# Width


def test_the_width_is_widened_for_masks_too_alike_and_narrowed_for_masks_too_different():
    assert steered(1.0, 0.95) == pytest.approx(math.exp(0.05))
    assert steered(1.0, 0.5) == pytest.approx(math.exp(-0.05))
    assert steered(1.0, 0.8) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grid_gaussian", "bernoulli"])
def test_steering_brings_the_group_into_its_band_from_either_side(name: str):
    coarse = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    what, policy = (
        drawn(3 * F.interpolate(coarse, size=(16, 16), mode="bilinear")[:, 0]),
        MASK_POLICIES[name](4),
    )
    low, high = mask_policy.TARGET_IOU
    for width in (0.01, 10.0):
        for step in range(250):
            alike = float(grpo.group_overlap(act(policy, what, width=width, seed=step, group=6).masks).mean())
            width = steered(width, alike)
        assert low - 0.05 < alike < high + 0.05
