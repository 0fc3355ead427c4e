from __future__ import annotations

import numpy as np
import pytest

from ans_core.data.fill_polygon import Point, filled

STAR = """\
.........#.......
.####...##.......
.##########......
.#######..#####..
.#######...###...
#######....##....
#######...###....
######...####....
######..#####....
#####..#######...
..############...
...############..
...#....#######..
...........#####.
..............##.
................."""
FLAT = """\
............
............
............
..########..
......####..
............"""
OUTSIDE = """\
.#########..
##########..
###########.
###########.
.##########.
...#########
.....#######
.......#####
.........###
...........#"""


@pytest.mark.parametrize(
    ("points", "picture"),
    [
        ([(1, 1), (14, 3), (3, 12), (9, 0), (15, 14), (0, 9)], STAR),
        ([(2, 3), (9, 3), (9, 4)], FLAT),
        ([(-4, 2), (8, -3), (12, 9)], OUTSIDE),
    ],
)
def test_the_pixels_are_those_of_opencv_4_14(points: list[Point], picture: str):
    wanted = np.array([[letter == "#" for letter in row] for row in picture.splitlines()])
    assert (filled(points, height=wanted.shape[0], width=wanted.shape[1]) == wanted).all()
