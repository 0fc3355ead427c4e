"""Other views of a picture: where its region lies in them, and what loop 1 pays by them."""

import random

import numpy as np
import pytest
from PIL import Image

from ans_core.rl.augmentations import AUGMENTATIONS, LEAST_CROPPED, MOST_CROPPED

HEIGHT, WIDTH = 40, 60


def scene() -> tuple[Image.Image, np.ndarray]:
    """Return a black picture with a red square near the upper left corner, and its mask."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    pixels[4:10, 6:16] = (255, 0, 0)
    return Image.fromarray(pixels), pixels[:, :, 0] > 0


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_mask_lies_on_its_region_in_every_view(name):
    image, mask = scene()
    for seed in range(20):
        view, moved = AUGMENTATIONS[name](image, mask, random.Random(seed))
        assert moved.shape == (view.height, view.width)
        assert np.array_equal(moved, np.asarray(view)[:, :, 0] > 0)
        assert moved.sum() == mask.sum(), "all of the region is in the view"


def test_the_region_is_elsewhere_in_a_mirrored_and_in_a_turned_view():
    image, mask = scene()
    centres = {}
    for name in ("mirrored", "turned"):
        ys, xs = np.nonzero(AUGMENTATIONS[name](image, mask, random.Random(0))[1])
        centres[name] = (ys.mean(), xs.mean())
    assert centres == {"mirrored": (6.5, 48.5), "turned": (32.5, 48.5)}


def test_a_crop_keeps_the_named_share_of_a_side_and_differs_by_seed():
    image, mask = scene()
    views = [AUGMENTATIONS["cropped"](image, mask, random.Random(seed))[0] for seed in range(20)]
    assert len({view.tobytes() for view in views}) > 10
    for view in views:
        assert LEAST_CROPPED * WIDTH - 1 <= view.width <= MOST_CROPPED * WIDTH + 1
        assert LEAST_CROPPED * HEIGHT - 1 <= view.height <= MOST_CROPPED * HEIGHT + 1


def test_a_region_as_large_as_the_picture_is_not_cut_and_an_empty_one_has_a_view():
    image, mask = scene()
    assert AUGMENTATIONS["cropped"](image, np.ones_like(mask), random.Random(0))[0].size == image.size
    view, moved = AUGMENTATIONS["cropped"](image, np.zeros_like(mask), random.Random(0))
    assert moved.shape == (view.height, view.width)
    assert not moved.any()
