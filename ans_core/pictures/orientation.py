"""How a stored picture is to be shown: EXIF's eight orientations and the display matrix of a clip, as one
number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import ExifTags, Image

UPRIGHT = 1
METHODS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,  # Pillow turns counter-clockwise
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF's orientation -> what makes the stored picture upright."""
INVERSE = {6: 8, 8: 6}
"""What undoes an orientation, where it is not the same one."""
SIGNS = {
    (1, 0, 0, 1): UPRIGHT,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}
"""Signs of a display matrix (a, b, c, d), by which (x, y) is shown at (a x + c y, b x + d y) -> EXIF's
orientation."""


def of_picture(picture: Image.Image) -> int:
    """Return EXIF's orientation, 1 to 8, of a picture as Pillow opened it; other values count as 1, upright,
    as does EXIF that is none (Pillow raises SyntaxError).

    Pillow turns a TIFF itself. A PNG's tag counts if it stands before the pixels: Pillow's own `getexif`
    decodes them to look for a later one.
    """
    if picture.format == "TIFF":
        return UPRIGHT
    try:
        number = Image.Image.getexif(picture).get(ExifTags.Base.Orientation)
    except SyntaxError:
        return UPRIGHT
    return number if number in METHODS else UPRIGHT


def of_matrix(matrix: Sequence[int]) -> int | None:
    """Return the orientation of a clip's display matrix of nine numbers, row by row; None for one that turns
    by no quarter."""
    a, b, _, c, d = (int(np.sign(number)) for number in matrix[:5])
    return SIGNS.get((a, b, c, d))


def swaps_sides(orientation: int) -> bool:
    """Tell whether width and height of the stored picture change places."""
    return orientation >= 5


def upright(picture: Image.Image, orientation: int) -> Image.Image:
    """Turn or mirror a stored picture; what is returned says no orientation any more."""
    if orientation == UPRIGHT:
        return picture
    shown = picture.transpose(METHODS[orientation])
    shown.info = {}  # it holds the tag, by which a later reader would turn the picture again
    return shown


def stored(picture: Image.Image, orientation: int) -> Image.Image:
    """Undo `upright`."""
    return upright(picture, INVERSE.get(orientation, orientation))
