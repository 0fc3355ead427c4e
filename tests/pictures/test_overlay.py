import numpy as np
import pytest
from PIL import Image

from ans_core.pictures import rle
from ans_core.pictures.overlay import COLOURS, draw, side_by_side

GREY = Image.new("RGB", (12, 10), (100, 100, 100))


def block() -> dict:
    mask = np.zeros((10, 12), bool)
    mask[3:7, 3:8] = True
    return rle.encode(mask)


def test_a_mask_is_filled_translucently_inside_a_contour_with_a_white_rim():
    drawn = np.asarray(draw(GREY, [block()]))
    assert tuple(drawn[4, 4]) == tuple(round(0.75 * 100 + 0.25 * c) for c in COLOURS[0])
    assert tuple(drawn[3, 3]) == COLOURS[0]
    assert tuple(drawn[2, 4]) == (255, 255, 255)
    assert tuple(drawn[0, 0]) == tuple(drawn[2, 2]) == (100, 100, 100)
    assert np.asarray(GREY).max() == 100  # the given picture is left alone


def test_empty_and_missing_masks_draw_nothing_and_keep_their_colour():
    assert np.array_equal(draw(GREY, [None, rle.empty(10, 12)]), GREY)
    assert tuple(np.asarray(draw(GREY, [None, block()]))[3, 3]) == COLOURS[1]


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"mask 0 of size \[3, 3\].*\[10, 12\]"):
        draw(GREY, [rle.empty(3, 3)])


def test_truth_stands_left_and_prediction_right():
    sheet = np.asarray(
        side_by_side(
            GREY, truth=[block()], prediction=[], question="q", truth_text="t", prediction_text="a " * 200
        )
    )
    half = sheet.shape[1] // 2
    assert (sheet[:, :half] == COLOURS[0]).all(-1).any()
    assert not (sheet[:, half:] == COLOURS[0]).all(-1).any()
