from __future__ import annotations

import math

import pytest
import torch

from ans_core.config.memory import MemoryLoss
from ans_core.losses import promptable_loss
from ans_core.tracking.loss import frame_losses, total


def test_the_parts_by_hand():
    """Two masks of 2 x 2 pixels, target the left column. Mask 1 is right with logits of 2; mask 0 is empty
    with logits of -2."""
    target = torch.tensor([[[1, 0], [1, 0]]], dtype=torch.bool)
    logits = torch.tensor([[[[-2.0, -2], [-2, -2]], [[2, -2], [2, -2]]]])
    parts = frame_losses(
        logits, torch.tensor([[0.5, 0.9]]), torch.tensor([0.0]), target, MemoryLoss(kind="bce")
    )
    p = 1 / (1 + math.exp(-2))
    assert float(parts["mask"]) == pytest.approx(-math.log(p))  # every pixel is right with probability p
    assert float(parts["dice"]) == pytest.approx(1 - (2 * 2 * p + 1) / (2 * p + 2 * (1 - p) + 2 + 1))
    assert float(parts["iou"]) == pytest.approx((0.5 + 0.1) / 2)  # of both masks: IoUs are 0 and 1
    assert float(parts["object"]) == pytest.approx(math.log(2))


def test_an_absent_object_costs_its_score_alone_and_a_blank_mask_would_still_teach():
    target = torch.zeros(1, 4, 4, dtype=torch.bool)
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    score = torch.tensor([-1.5], requires_grad=True)
    parts = frame_losses(logits, torch.rand(1, 3), score, target, MemoryLoss())
    total(parts, MemoryLoss()).backward()
    assert [parts[name].item() for name in ("mask", "dice", "iou")] == [0, 0, 0]
    assert score.grad is not None
    assert float(score.grad) == pytest.approx(1 / (1 + math.exp(1.5)))


def test_weighted_parts_are_the_loss_that_pictures_are_trained_with():
    torch.manual_seed(0)
    logits, ious, score, target = (
        torch.randn(3, 3, 8, 8),
        torch.rand(3, 3),
        torch.randn(3),
        torch.rand(3, 16, 16) > 0.6,
    )
    parts = frame_losses(logits, ious, score, target, MemoryLoss())
    assert float(total(parts, MemoryLoss())) / 3 == pytest.approx(
        float(promptable_loss(logits, ious, score, target)), rel=1e-5
    )


def test_an_object_too_small_for_the_decoder_teaches_no_iou():
    """A pixel of 4 x 4 is a sixteenth of a cell: whatever is drawn there, its IoU would be 0."""
    target = torch.zeros(2, 8, 8, dtype=torch.bool)
    target[0, 1, 1], target[1, 0:4, 0:4] = True, True
    logits, ious, score = torch.full((2, 1, 2, 2), -2.0), torch.full((2, 1), 0.7), torch.zeros(2)
    logits[:, 0, 0, 0] = 2.0
    parts = frame_losses(logits, ious, score, target, MemoryLoss())
    assert float(parts["iou"]) == pytest.approx(0.3)  # of the second alone
    assert float(parts["dice"]) > 0
    one, both = (
        promptable_loss(logits[chosen], ious[chosen], score[chosen], target[chosen])
        for chosen in ([1], [0, 1])
    )
    assert float(both) != pytest.approx(float(one), abs=1e-3)  # the mask of the small one still counts
