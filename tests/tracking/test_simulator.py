from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ans_core.tracking.simulator import center, corrected, noisy_box, points_for, positive_points


def ring() -> np.ndarray:
    """A square with a hole: its middle is not inside."""
    mask = np.zeros((40, 60), bool)
    mask[10:30, 20:44] = True
    mask[13:27, 23:38] = False
    return mask


def test_points_lie_inside_and_the_first_is_the_deepest_pixel_if_asked_for():
    mask = ring()
    x, y = center(mask)
    # 3 pixels from the upper edge, 4 from the right one, more from the hole; the first such pixel
    assert (x, y) == (40, 12)
    for seed in range(20):
        points, labels = positive_points(mask, count=4, include_center=seed % 2 == 0, rng=random.Random(seed))
        assert all(mask[int(y), int(x)] for x, y in points)
        assert labels == [1, 1, 1, 1]
        # the uniform ones differ
        assert len({tuple(p) for p in points[seed % 2 == 0 :]}) == 4 - (seed % 2 == 0)
        assert (points[0] == [x, y]) or seed % 2


def test_a_mask_with_fewer_pixels_than_points_repeats_them():
    mask = np.zeros((8, 8), bool)
    mask[3, 5] = True
    assert positive_points(mask, count=3, include_center=True, rng=random.Random(0)) == (
        [[5.0, 3.0]] * 3,
        [1, 1, 1],
    )


@pytest.mark.slow
def test_a_box_is_off_by_a_tenth_of_its_sides_at_most_and_stays_in_the_picture():
    mask = np.zeros((40, 60), bool)
    mask[0:20, 20:60] = True
    corners = np.array([noisy_box(mask, rng=random.Random(seed))[0] for seed in range(200)])
    off = corners - [[20, 0], [59, 19]]
    assert np.abs(off[..., 0]).max() <= 3.9
    assert np.abs(off[..., 1]).max() <= 1.9
    assert np.abs(off).max(0).min() > 0.5  # every side moves
    assert (corners.min((0, 1)) >= 0).all()
    assert (corners.max((0, 1)) <= [59, 39]).all()


def test_an_absent_object_is_prompted_by_a_click_outside():
    for kind, length in (("point", 3), ("box", 2)):
        points, labels = points_for(
            np.zeros((8, 8), bool), kind, count=3, include_center=True, rng=random.Random(1)
        )  # type: ignore[arg-type]
        assert labels == [0] + [-1] * (length - 1)
        assert len(points) == length


def test_corrective_clicks_fall_where_the_prediction_is_wrong():
    """Object 0 misses its right half: a click inside there. Object 1 spills over to the left: a click outside
    there."""
    target = torch.zeros(2, 16, 16, dtype=torch.bool)
    target[0, :, 4:12] = True
    target[1, :, 8:12] = True
    logits = torch.full((2, 1, 16, 16), -5.0)
    logits[0, :, :, 4:8] = 5
    logits[1, :, :, 2:12] = 5
    prompt = {"point_coords": torch.zeros(2, 1, 2), "point_labels": torch.ones(2, 1, dtype=torch.int32)}
    torch.manual_seed(0)
    from_errors = 0
    for _ in range(60):
        found = corrected(prompt, logits, target)
        assert found["point_coords"].shape == (2, 2, 2)
        assert torch.equal(found["point_coords"][:, :1], prompt["point_coords"])
        (x0, _), (x1, _) = found["point_coords"][:, 1].tolist()
        kinds = found["point_labels"][:, 1].tolist()
        if kinds == [1, 0]:
            from_errors += 1
            assert 8 <= x0 < 12
            assert 2 <= x1 < 8
        else:  # a tenth comes from the true mask
            assert kinds == [1, 1]
            assert 8 <= x1 < 12
    assert 48 <= from_errors < 60
