from __future__ import annotations

import numpy as np
import pytest

from ans_core import rle


def mask(*rows: str) -> np.ndarray:
    return np.array([[c == "x" for c in row] for row in rows])


def test_a_mask_comes_back_from_its_code():
    one = mask("x..", ".xx")
    code = rle.encode(one)
    assert code["size"] == [2, 3]
    assert isinstance(code["counts"], str)
    assert (rle.decode(code) == one).all()
    assert rle.area(code) == 3
    assert rle.area(rle.empty(4, 5)) == 0
    assert rle.empty(4, 5)["size"] == [4, 5]


def test_the_union_has_the_pixels_of_any():
    union = rle.union([rle.encode(mask("x..", "...")), rle.encode(mask("xx.", "..x"))])
    assert (rle.decode(union) == mask("xx.", "..x")).all()


def test_all_three_forms_of_annotations_give_the_same_mask():
    """A 2 x 2 square at x 1-3, y 1-3 of 4 x 5 pixels; uncompressed counts run down the columns: 5 out, 2 in, 2 out, 2 in, 9 out."""
    square = mask(".....", ".xx..", ".xx..", ".....")
    forms = [[[1, 1, 3, 1, 3, 3, 1, 3]], [1, 1, 3, 1, 3, 3, 1, 3], {"size": [4, 5], "counts": [5, 2, 2, 2, 9]}, rle.encode(square)]
    for form in forms:
        assert (rle.decode(rle.from_annotation(form, height=4, width=5, where="x")) == square).all()


def test_several_polygons_are_one_mask():
    both = rle.from_annotation([[0, 0, 1, 0, 1, 1, 0, 1], [3, 0, 5, 0, 5, 2, 3, 2]], height=4, width=5, where="x")
    assert rle.area(both) == 1 + 4


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"size": [5, 4], "counts": "1"}, r"a.json id 3: RLE size \[5, 4\] is not the image's \[height, width\] = \[4, 5\]"),
        ({"size": [4, 5], "counts": [5, 2]}, "add up to 7, the image has 20 pixels"),
        ([[1, 1, 2, 2]], "a polygon needs at least 3 points .* got 4 numbers"),
        ([[1, 1, 2, 2, 3, 3, 4]], "got 7 numbers"),
        ([], "neither polygons nor RLE but list"),
        ("abc", "neither polygons nor RLE but str 'abc'"),
    ],
)
def test_an_annotation_that_is_wrong_is_refused_by_name(form: object, message: str):
    with pytest.raises(ValueError, match=message):
        rle.from_annotation(form, height=4, width=5, where="a.json id 3")
