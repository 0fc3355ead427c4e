from __future__ import annotations

import numpy as np
import pytest

from ans_core.pictures import rle


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


def test_area_and_box_are_those_of_the_pixels():
    rng = np.random.default_rng(0)
    for density in (0.0, 0.02, 0.3, 0.9, 1.1):
        for _ in range(40):
            mask = rng.random(rng.integers(1, 14, 2)) < density
            rows, columns = np.nonzero(mask)
            corners = (0, 0, 0, 0)
            if mask.any():
                corners = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            coded = rle.encode(mask)
            assert rle.area(coded) == mask.sum()
            assert rle.pixel_box(coded) == corners


def test_the_union_has_the_pixels_of_any():
    union = rle.union([rle.encode(mask("x..", "...")), rle.encode(mask("xx.", "..x"))])
    assert (rle.decode(union) == mask("xx.", "..x")).all()


def test_all_three_forms_of_annotations_give_the_same_mask():
    """A 2 x 2 square at x 1-3, y 1-3 of 4 x 5 pixels; uncompressed counts run down the columns: 5 out, 2 in,
    2 out, 2 in, 9 out."""
    square = mask(".....", ".xx..", ".xx..", ".....")
    forms = [
        [[1, 1, 3, 1, 3, 3, 1, 3]],
        [1, 1, 3, 1, 3, 3, 1, 3],
        {"size": [4, 5], "counts": [5, 2, 2, 2, 9]},
        rle.encode(square),
    ]
    for form in forms:
        assert (rle.decode(rle.from_annotation(form, height=4, width=5, where="x")) == square).all()


def test_a_matrix_of_the_pictures_size_is_a_mask():
    square = mask(".....", ".xx..", ".xx..", ".....")
    for value in (1, 1.0, 255, True):
        rows = [[value if pixel else 0 for pixel in row] for row in square]
        assert (rle.decode(rle.from_annotation(rows, height=4, width=5, where="x")) == square).all()
        assert rle.left_out(rows, height=4, width=5) == 0
    with pytest.raises(ValueError, match="a matrix of the picture's size holds 7"):
        rle.from_annotation([[7] * 5] * 4, height=4, width=5, where="x")


def test_a_polygon_that_encloses_nothing_adds_nothing_beside_another():
    square = [1, 1, 3, 1, 3, 3, 1, 3]
    # pycocotools takes the second for a box
    for stray in ([4, 3], [0, 0, 5, 4], [], [0, 0, 5, 0, 5, 4, 0], [0, 0, 5, float("nan"), 5, 4]):
        assert rle.area(rle.from_annotation([stray, square], height=4, width=5, where="x")) == 4
        assert rle.left_out([stray, square], height=4, width=5) == 1


def test_points_may_be_pairs():
    square = [[1, 1], [3, 1], [3, 3], [1, 3]]
    assert rle.area(rle.from_annotation([square], height=4, width=5, where="x")) == 4
    assert rle.left_out([square], height=4, width=5) == 0


def test_a_polygon_outside_of_the_picture_has_no_pixel_and_is_none_of_shares():
    outside = rle.from_annotation([[-4, -4, -1, -4, -1, -1]], height=40, width=50, where="x")
    assert rle.area(outside) == 0


def test_several_polygons_are_one_mask():
    both = rle.from_annotation(
        [[0, 0, 1, 0, 1, 1, 0, 1], [3, 0, 5, 0, 5, 2, 3, 2]], height=4, width=5, where="x"
    )
    assert rle.area(both) == 1 + 4


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"size": [5, 4], "counts": "1"},
            r"a.json id 3: RLE size \[5, 4\] is not the image's \[height, width\] = \[4, 5\]",
        ),
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


def test_runs_are_read_letter_by_letter():
    """ "0" is 48. From the fourth run on it is the difference that is written: 2 - 2 and 9 - 2. 20 needs two
    letters, 32 + 20 and 0."""
    assert rle.run_lengths("52207").tolist() == [5, 2, 2, 2, 9]
    assert rle.run_lengths("d0").tolist() == [20]


def test_runs_are_those_of_the_mask_at_every_size():
    rng = np.random.default_rng(0)
    for height, width, share in ((1, 1, 0.5), (7, 3, 0.1), (50, 40, 0.5), (700, 900, 0.0), (700, 900, 0.001)):
        one = rng.random((height, width)) < share
        column = one.T.ravel()
        edges = np.flatnonzero(np.diff(column)) + 1
        expected = np.diff([0, *edges, column.size]).tolist()
        assert rle.run_lengths(rle.encode(one)["counts"]).tolist() == ([0] * bool(column[0]) + expected)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"counts": "52d"}, "an end in the middle of a number"),
        ({"counts": "522"}, "add up to 9, the image has 20 pixels"),
        ({"counts": "522299"}, "add up to 37, the image has 20 pixels"),
        ({"counts": "oooooooo0"}, "a number beyond 32 bits"),
        ({"counts": "5~"}, 'letters outside of "0" to "o"'),
        ({"counts": "5é"}, 'letters outside of "0" to "o"'),
        ({"counts": "5\ud800"}, 'letters outside of "0" to "o"'),
        ({"counts": ""}, "no letters"),
        ({"counts": "O"}, "a run of negative length"),
        ({"counts": 5}, "counts are 5, neither text nor a list of numbers"),
        ({"counts": [5, -1, 16]}, "hold -1; they are lengths of runs"),
        ({"counts": [5, [2], 13]}, r"hold \[2\]; they are lengths of runs"),
        ({"counts": [5, 2, 12], "size": [4, 5]}, "add up to 19"),
        ({"counts": [20], "size": [4.0, 5]}, r"size is \[4.0, 5\], not two whole numbers"),
        ({"counts": [20], "size": [4, float("nan")]}, "not two whole numbers"),
        ({"counts": [20], "size": None}, "size is None"),
        ([[1, 1, 3, 1, 3, 1e308]], r"reaches 1e\+308, far outside of the picture of 5 x 4"),
        ([[1, 1, 3, 1, 3, float("nan")]], "at least 3 points .* got 6 numbers and NaN"),
        ([[1, 1, 3, 1, 3, None]], "holds None, which is no number"),
        ([[1, 1, 3, 1, 3, 3], None], "a polygon is None"),
        (
            [[0.1, 0.1, 0.3, 0.1, 0.3, 1]],
            r"lie in \[0, 1\], so they are shares of the picture; multiply x by its width \(5\)",
        ),
    ],
)
def test_what_would_crash_or_pass_silently_is_refused(form: object, message: str):
    if isinstance(form, dict):
        form = {"size": [4, 5]} | form
    with pytest.raises(ValueError, match=f"a.json id 3: .*{message}"):
        rle.from_annotation(form, height=4, width=5, where="a.json id 3")


def test_any_value_is_shown_in_a_few_words():
    deep: list[object] = []
    for _ in range(5_000):
        deep = [deep]
    for value in (deep, 10**5000, "x" * 10_000, {str(n): n for n in range(1000)}):
        assert len(rle.short(value)) < 120
