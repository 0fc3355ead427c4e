"""Measured properties against shapes, colours and waves worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ans_core.agent import shapes
from ans_core.agent.world.drawing import PATTERNS, paint_pattern


def rectangle(height: int, width: int) -> np.ndarray:
    mask = np.zeros((height + 6, width + 8), bool)
    mask[3:-3, 4:-4] = True
    return mask


def test_moments_of_rectangles_lines_and_discs() -> None:
    eccentricity, orientation = shapes.eccentricity_and_orientation(rectangle(4, 10))
    # variances are in the ratio of the squared sides
    assert eccentricity == pytest.approx(math.sqrt(1 - 0.4**2))
    assert orientation == pytest.approx(0)
    assert shapes.eccentricity_and_orientation(rectangle(10, 4))[1] == pytest.approx(90)
    rising = np.fliplr(np.eye(20, dtype=bool))
    assert shapes.eccentricity_and_orientation(rising)[1] == pytest.approx(45)
    assert shapes.eccentricity_and_orientation(rising[::-1])[1] == pytest.approx(-45)
    y, x = np.indices((101, 101)) - 50
    assert shapes.eccentricity_and_orientation(x * x + y * y <= 1600)[0] < 0.05


def test_solidity_and_parts() -> None:
    assert shapes.solidity(rectangle(4, 10)) == pytest.approx(1)
    corner = np.ones((10, 10), bool)
    corner[:5, 5:] = False
    assert shapes.solidity(corner) == pytest.approx(75 / 87.5)  # the hull cuts the corner off by half
    assert shapes.solidity(np.ones((1, 1), bool)) == pytest.approx(1)
    two = np.zeros((9, 9), bool)
    two[:3, :3] = two[6:, 6:] = True
    assert shapes.parts(two) == 2
    two[3:6, 3:6] = True  # touches both at a corner
    assert shapes.parts(two) == 1


def test_lab_is_that_of_the_standard() -> None:
    told = shapes.lab(
        np.array([[255, 255, 255], [255, 0, 0], [0, 0, 255], [0, 0, 0], [128, 128, 128]], np.uint8)
    )
    # Bruce Lindbloom's calculator, sRGB, D65
    expected = [[100, 0, 0], [53.24, 80.09, 67.20], [32.30, 79.19, -107.86], [0, 0, 0], [53.59, 0, 0]]
    np.testing.assert_allclose(told, expected, atol=0.02)
    assert {
        name: shapes.colour_name(shapes.lab(np.array(rgb, np.uint8))) for name, rgb in shapes.NAMES.items()
    } == {name: name for name in shapes.NAMES}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", ["square", "disc"])
def test_texture_is_the_pattern_that_was_painted(pattern: str, shape: str) -> None:
    image = np.full((90, 90, 3), (214, 32, 38), np.uint8)
    y, x = np.indices((90, 90)) - 45
    mask = (x * x + y * y < 35**2) if shape == "disc" else np.maximum(abs(x), abs(y)) < 30
    lightness = shapes.lab(image)[..., 0]
    assert shapes.texture(lightness, mask) == ("plain", 0.0, pytest.approx(0, abs=1e-9))
    paint_pattern(image, mask, pattern)
    direction, period, contrast = shapes.texture(shapes.lab(image)[..., 0], mask)
    assert direction == pattern
    # diagonal stripes repeat every 4 pixels along rows: 4 / sqrt 2 from stripe to stripe
    assert period == pytest.approx(4 / math.sqrt(2) if pattern == "diagonal" else 4, rel=0.05)
    assert contrast > 5
    noise = np.random.default_rng(0).normal(50, 10, (90, 90))
    assert shapes.texture(noise, mask)[0] == "irregular"
