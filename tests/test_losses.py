from __future__ import annotations

import math

import pytest
import torch

from ans_core import losses
from tests.golden import arrays, error, needs_golden


@needs_golden
def test_points_are_sampled_as_upstream_does():
    golden = arrays("misc/losses")
    assert (
        error(losses.point_sample(golden["pred_logits"], golden["points"])[:, :2000], golden["sampled_pred"])
        < 1e-5
    )
    assert (
        error(losses.point_sample(golden["gt"].float(), golden["points"])[:, :2000], golden["sampled_gt"])
        < 1e-5
    )


@needs_golden
def test_mask_and_dice_loss_equal_upstreams_at_its_points():
    golden = arrays("misc/losses")
    at_points = (losses.point_sample(golden[key].float(), golden["points"]) for key in ("pred_logits", "gt"))
    bce, dice = losses.point_losses(*at_points)
    assert error(2.0 * bce, golden["loss_mask"]) < 1e-5
    assert error(0.5 * dice, golden["loss_dice"]) < 1e-5


@needs_golden
def test_the_whole_mask_loss_is_near_upstreams_whatever_points_are_drawn():
    golden = arrays("misc/losses")
    torch.manual_seed(0)
    bce, dice = losses.mask_losses(golden["pred_logits"], golden["gt"] > 0, points=12544)
    assert math.isclose(2.0 * bce, golden["loss_mask"], rel_tol=0.05)
    assert math.isclose(0.5 * dice, golden["loss_dice"], rel_tol=0.05)


def test_a_point_is_x_then_y_and_zero_outside():
    maps = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    points = torch.tensor([[[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.5, 0.5], [0.0, 0.25], [-1.0, 0.5]]])
    assert losses.point_sample(maps, points).tolist() == [[1.0, 2.0, 3.0, 2.5, 0.5, 0.0]]


def test_uncertain_points_gather_at_the_border_of_the_mask():
    """Logits rise from -8 to 8 across the image: 3/4 of the points are the least certain third of candidates,
    near x = 1/2."""
    torch.manual_seed(0)
    logits = torch.linspace(-8, 8, 64).expand(2, 64, 64)
    points = losses.uncertain_points(logits, points=1000)
    assert points.shape == (2, 1000, 2)
    away = (points[..., 0] - 0.5).abs()
    inside = ((points[..., 1] - 0.5).abs() < 0.48)[:, :750]  # beyond, zero padding halves the logits
    # the nearest quarter of 3000 uniform candidates lies within 1/8
    assert away[:, :750][inside].max() < 0.14
    assert away[:, 750:].max() > 0.4


def test_text_loss_is_the_mean_over_learned_tokens():
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    assert losses.text_loss(logits, torch.tensor([0, 1])).item() == pytest.approx(
        (math.log(4 / 3) + math.log(2)) / 2
    )


def test_dice_of_full_half_and_empty_masks():
    """4 points: equal 1 - 9/9 = 0; half of p right 1 - (2*2+1)/(4+2+1) = 2/7; both empty 0."""
    p = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    target = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    assert losses.dice(p, target).tolist() == pytest.approx([0, 2 / 7, 0])


def test_focal_loss_at_even_odds_is_a_quarter_of_the_weighted_entropy():
    """Logit 0: (1 - 1/2)^2 * log 2 times alpha .25 for a target of 1, .75 for 0."""
    loss = losses.focal(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    assert loss.item() == pytest.approx(0.25 * math.log(2) * (0.25 + 0.75) / 2)


def test_promptable_loss_is_zero_for_perfect_masks_ious_and_scores():
    target = torch.zeros(2, 8, 8, dtype=torch.bool)
    target[0, 2:6, 2:6] = True  # the second object is absent: its masks count for nothing
    logits = (target.float() * 2 - 1)[:, None].repeat(1, 3, 1, 1) * 50
    logits[1] = 50
    loss = losses.promptable_loss(logits, torch.ones(2, 3), torch.tensor([50.0, -50.0]), target)
    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_promptable_loss_takes_the_best_of_three_masks():
    target = torch.zeros(1, 8, 8, dtype=torch.bool)
    target[0, 2:6, 2:6] = True
    right = (target.float() * 2 - 1) * 50
    logits = torch.stack([-right, right, -right], dim=1)
    loss = losses.promptable_loss(logits, torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([50.0]), target)
    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_without_points_every_pixel_counts():
    """Logits 0 and 2 against 1 and 0: BCE (log 2 + log(1 + e^2)) / 2, dice 1 - (2 * 0.5 + 1) / (0.5 + s(2) +
    1 + 1)."""
    logits, target = torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[True, False]]])
    bce, dice = losses.mask_losses(logits, target, points=0)
    assert bce.item() == pytest.approx((math.log(2) + math.log1p(math.exp(2))) / 2, rel=1e-3)
    assert dice.item() == pytest.approx(1 - 2 / (2.5 + 1 / (1 + math.exp(-2))), rel=1e-3)
    assert losses.mask_losses(logits.repeat_interleave(2, 2), target, points=0)[0].item() == pytest.approx(
        bce.item()
    )
