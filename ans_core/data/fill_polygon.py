"""Polygons of whole pixels -> masks as OpenCV's `fillPoly` draws them, edges included: some benchmarks' true
masks are its pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool

ONE = 1 << 16
"""OpenCV counts columns in 65,536ths here."""
Point = tuple[int, int]
"""(x, y)"""


def filled(points: Sequence[Point], *, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """Fill by the even-odd rule, and draw the edges. With points outside of the picture a pixel at its edge
    may differ from OpenCV's."""
    mask = np.zeros((height, width), bool)
    for start, end in _edges(points):
        _line(mask, start, end)
    rows: dict[int, list[int]] = {}
    for start, end in _edges(points):
        if start[1] == end[1]:
            continue
        # OpenCV's slope is that of the part inside
        (xa, ya), (xb, yb), _ = _clipped(start, end, right=width - 1, bottom=height - 1)
        if ya == yb:
            (xa, ya), (xb, yb) = start, end
        slope = _divided((xb - xa) * ONE, yb - ya)
        for y in range(max(min(start[1], end[1]), 0), min(max(start[1], end[1]), height)):
            rows.setdefault(y, []).append(xa * ONE + (y - ya) * slope)
    for y, crossed in rows.items():
        crossed.sort()
        for left, right in zip(crossed[::2], crossed[1::2], strict=True):
            mask[y, max(-(-left // ONE), 0) : max(right // ONE + 1, 0)] = True
    return mask


def _edges(points: Sequence[Point]) -> Iterator[tuple[Point, Point]]:
    yield from zip((points[-1], *points[:-1]), points, strict=True)


def _divided(above: int, below: int) -> int:
    """Divide as C does, towards 0."""
    quotient = abs(above) // abs(below)
    return quotient if (above < 0) == (below < 0) else -quotient


def _line(mask: Bool[np.ndarray, "H W"], start: Point, end: Point) -> None:
    """Draw a line by Bresenham's rule, from left to right."""
    height, width = mask.shape
    start, end, seen = _clipped(start, end, right=width - 1, bottom=height - 1)
    if not seen:
        return
    (x, y), (x1, y1) = (start, end) if start[0] <= end[0] else (end, start)
    dx, dy, down = x1 - x, abs(y1 - y), 1 if y1 >= y else -1
    steep = dy > dx
    long, short = (dy, dx) if steep else (dx, dy)
    error = long - 2 * short
    for _ in range(long + 1):
        mask[y, x] = True
        aside = error < 0
        error += 2 * long * aside - 2 * short
        x += 1 if not steep or aside else 0
        y += down if steep or aside else 0


def _clipped(start: Point, end: Point, *, right: int, bottom: int) -> tuple[Point, Point, bool]:
    """Return the ends of a line's part within the picture, rounded as OpenCV rounds them, and whether there
    is such a part."""

    def side(x: int) -> int:
        return (x < 0) + 2 * (x > right)

    def outside(point: Point) -> int:
        return side(point[0]) + 4 * (point[1] < 0) + 8 * (point[1] > bottom)

    one, two = outside(start), outside(end)
    if not one & two and one | two:
        if one & 12:
            start = _at_row(start, end, 0 if one < 8 else bottom)
            one = side(start[0])
        if two & 12:
            end = _at_row(end, start, 0 if two < 8 else bottom)
            two = side(end[0])
        if not one & two and one | two:
            if one:
                start, one = _at_column(start, end, 0 if one == 1 else right), 0
            if two:
                end, two = _at_column(end, start, 0 if two == 1 else right), 0
    return start, end, not one | two


def _at_row(point: Point, other: Point, row: int) -> Point:
    """Move an end of a line along it."""
    (x, y), (other_x, other_y) = point, other
    return x + int((row - y) * (other_x - x) / (other_y - y)), row


def _at_column(point: Point, other: Point, column: int) -> Point:
    y, x = _at_row(point[::-1], other[::-1], column)
    return x, y
