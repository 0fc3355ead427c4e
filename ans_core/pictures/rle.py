"""Convert masks to and from COCO run-length text (pycocotools does the coding; this file checks and
converts)."""

from __future__ import annotations

import math
import reprlib
from itertools import chain
from typing import TypeGuard

import numpy as np
from jaxtyping import Bool, Int64
from PIL import Image
from pycocotools import mask as coco

from ans_core.pictures import orientation
from ans_core.types import RLE

LETTERS = bytes(range(48, 112))
"""Letters of compressed counts."""
CONTINUED = 80
"""From this letter on, the number goes on in the next letter."""
LONGEST = 7
"""Letters of a number of 32 bits."""
VALUES = np.array([letter - 48 if letter < 64 else letter - 80 for letter in range(112)])
"""Of each letter: 0 to 31 where the number goes on, else -16 to 15, as the highest bit is the sign."""
MARGIN = 0.1
"""How far outside the picture a polygon may reach, as a share of the longer side: annotators overshoot, but
farther points belong to another picture."""


def encode(mask: Bool[np.ndarray, "H W"]) -> RLE:
    rle = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [int(n) for n in rle["size"]], "counts": rle["counts"].decode("ascii")}


def decode(rle: RLE) -> Bool[np.ndarray, "H W"]:
    return coco.decode(rle).view(bool)


def upright(rle: RLE, turn: int) -> RLE:
    """Turn or mirror a mask of the stored pixels as `orientation.upright` does their picture."""
    return (
        rle
        if turn == orientation.UPRIGHT
        else encode(np.asarray(orientation.upright(Image.fromarray(decode(rle)), turn)))
    )


def stored(rle: RLE, turn: int) -> RLE:
    """Undo `upright`."""
    return (
        rle
        if turn == orientation.UPRIGHT
        else encode(np.asarray(orientation.stored(Image.fromarray(decode(rle)), turn)))
    )


def empty(height: int, width: int) -> RLE:
    return encode(np.zeros((height, width), bool))


def area(rle: RLE) -> int:
    return int(coco.area(rle))


def box(rle: RLE) -> tuple[float, float, float, float]:
    """Return x1, y1, x2, y2 of a non-empty mask, as shares of the image."""
    (x1, y1, x2, y2), (height, width) = pixel_box(rle), rle["size"]
    return x1 / width, y1 / height, x2 / width, y2 / height


def pixel_box(rle: RLE) -> tuple[int, int, int, int]:
    """Return x1, y1, x2, y2 (behind the last pixel) of a mask; zeros for an empty one. Nothing is decoded."""
    x, y, width, height = map(int, coco.toBbox(rle))
    return x, y, x + width, y + height


def rectangle(
    left: float | int, top: float | int, right: float | int, bottom: float | int
) -> list[float | int]:
    """Return a box as a polygon [x1, y1, x2, y2, ...], clockwise from the left upper corner."""
    return [left, top, right, top, right, bottom, left, bottom]


def union(rles: list[RLE]) -> RLE:
    """Return all pixels of any of the masks (at least one mask, all of one size)."""
    merged = coco.merge(rles)
    return {"size": [int(n) for n in merged["size"]], "counts": merged["counts"].decode("ascii")}


def iou(one: RLE, other: RLE) -> float:
    """Return the intersection over the union of two masks of one size; 0 where both are empty."""
    return float(coco.iou([one], [other], [0])[0, 0])


def from_annotation(segmentation: object, *, height: int, width: int, where: str) -> RLE:
    """Convert any of COCO's three forms (list of polygons, uncompressed RLE, compressed RLE), or a matrix of
    0 and 1 (or 255), to a compressed RLE of exactly height x width. A polygon of fewer than 3 points beside a
    good one adds nothing, nor does one with NaN.

    Raises ValueError naming `where` for anything else. Everything is checked here: pycocotools reads past the
    end of truncated counts, and takes two points for a box, and a coordinate of 1e308 kills the process.
    """
    if isinstance(segmentation, dict) and "counts" in segmentation and "size" in segmentation:
        size, counts = segmentation["size"], segmentation["counts"]
        if not (isinstance(size, (list, tuple)) and [type(n) for n in size] == [int, int]):
            raise ValueError(f"{where}: RLE size is {short(size)}, not two whole numbers [height, width]")
        if list(size) != [height, width]:
            raise ValueError(
                f"{where}: RLE size {short(list(size))} is not the image's [height, width] = [{height}, "
                f"{width}]"
            )
        if isinstance(counts, list):
            return _from_runs(counts, height=height, width=width, where=where)
        return _from_counts(counts, height=height, width=width, where=where)
    if is_matrix(segmentation, height=height, width=width):
        return _from_matrix(segmentation, where=where)
    if isinstance(segmentation, list) and segmentation:
        polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
        if not (good := outlines(polygons)):
            nan = " and NaN" if has_nan(polygons[0]) else ""
            raise NoOutlineError(
                f"{where}: a polygon needs at least 3 points as [x1, y1, x2, y2, ...], "
                f"got {len(polygons[0])} numbers{nan}"
            )
        return _from_polygons(good, height=height, width=width, where=where)
    kind = NoOutlineError if segmentation in (None, []) else ValueError
    raise kind(
        f"{where}: segmentation is neither polygons nor RLE but {type(segmentation).__name__} "
        f"{short(segmentation)}"
    )


class NoOutlineError(ValueError):
    """An object without a mask: nothing at all, or polygons none of which has 3 points."""


def is_matrix(segmentation: object, *, height: int, width: int) -> TypeGuard[list[list[object]]]:
    """Tell whether a mask is a list of rows of the picture's size."""
    rows = segmentation if isinstance(segmentation, list) else []
    return len(rows) == height and all(isinstance(row, list) and len(row) == width for row in rows)


def outlines(polygons: list[object]) -> list[object]:
    """Return the polygons as [x1, y1, x2, y2, ...] (some tools write [[x1, y1], ...]) without those that
    enclose nothing: of fewer than 3 points, with half a point, or with NaN. Tools write them where somebody
    clicked once too often."""
    flat = [list(chain.from_iterable(p)) if is_of_points(p) else p for p in polygons]
    return [
        p for p in flat if not isinstance(p, list) or (len(p) >= 6 and len(p) % 2 == 0 and not has_nan(p))
    ]


def is_of_points(polygon: object) -> TypeGuard[list[list[object]]]:
    points = polygon if isinstance(polygon, list) else []
    return bool(points) and all(isinstance(point, list) and len(point) == 2 for point in points)


def has_nan(polygon: list[object]) -> bool:
    return any(isinstance(value, float) and math.isnan(value) for value in polygon)


def left_out(segmentation: object, *, height: int, width: int) -> int:
    """Return how many polygons of a mask `from_annotation` leaves out."""
    if (
        not isinstance(segmentation, list)
        or not isinstance(segmentation[0], list)
        or is_matrix(segmentation, height=height, width=width)
    ):
        return 0
    return len(segmentation) - len(outlines(segmentation))


def run_lengths(counts: str) -> Int64[np.ndarray, " n"]:
    """Decode the runs of compressed counts. Raises ValueError with the reason where pycocotools would read
    nonsense, or past the end.

    A number is stored as letters from "0" (48) on, 5 bits per letter, lowest first; the sixth bit says that
    more letters follow. The highest bit of the last letter is the sign. From the fourth run on, a number is
    the difference from the run before the last.
    """
    stored = counts.encode("utf-8", "surrogatepass")
    if not stored:
        raise ValueError("no letters")
    if stored.translate(None, LETTERS):
        raise ValueError('letters outside of "0" to "o"')
    if stored[-1] >= CONTINUED:
        raise ValueError("an end in the middle of a number")
    letters = np.frombuffer(stored, np.uint8)
    ends = (letters < CONTINUED).nonzero()[0]
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(letters)) - starts.repeat(ends - starts + 1)  # of each letter in its number
    if place.max() >= LONGEST:
        raise ValueError("a number beyond 32 bits")
    runs = np.add.reduceat(VALUES[letters] << (5 * place), starts)
    for first in (1, 2):
        np.add.accumulate(runs[first::2], out=runs[first::2])
    if runs.min() < 0:
        raise ValueError("a run of negative length")
    return runs


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 200 else f"a number of {x.bit_length()} bits"


_repr = _Short()
_repr.maxstring = _repr.maxother = 60


def resized(mask: RLE, size: tuple[int, int]) -> RLE:
    """Return a mask at another (width, height), by the nearest pixels."""
    if mask["size"] == [size[1], size[0]]:
        return mask
    return encode(np.asarray(Image.fromarray(decode(mask)).resize(size, Image.Resampling.NEAREST)))


def short(value: object) -> str:
    """Show any value in a few words, however deep or large it is."""
    return _repr.repr(value)


def _from_counts(counts: object, *, height: int, width: int, where: str) -> RLE:
    again = "write it again with pycocotools' mask.encode"
    text = counts.decode("latin-1") if isinstance(counts, bytes) else counts
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: RLE counts are {short(counts)}, neither text nor a list of numbers; {again}"
        )
    try:
        total = int(run_lengths(text).sum())
    except ValueError as error:
        raise ValueError(f"{where}: RLE counts {short(text)} have {error}; {again}") from None
    _same_total(total, height=height, width=width, where=where)
    return {"size": [height, width], "counts": text}


def _from_runs(runs: list[object], *, height: int, width: int, where: str) -> RLE:
    for run in runs:
        if type(run) is not int or run < 0:
            raise ValueError(
                f"{where}: uncompressed RLE counts hold {short(run)}; they are lengths of runs, whole "
                "numbers from 0 on"
            )
    _same_total(sum(runs), height=height, width=width, where=where)  # type: ignore[arg-type]
    return _text(coco.frPyObjects({"size": [height, width], "counts": runs}, height, width))


def _same_total(total: int, *, height: int, width: int, where: str) -> None:
    if total != height * width:
        raise ValueError(
            f"{where}: RLE counts add up to {short(total)}, the image has {height * width} pixels; is it "
            "another picture's mask?"
        )


def _from_polygons(polygons: list[object], *, height: int, width: int, where: str) -> RLE:
    smallest, largest = math.inf, 0.0
    for polygon in polygons:
        if not isinstance(polygon, list):
            raise ValueError(f"{where}: a polygon is {short(polygon)}, not a list [x1, y1, x2, y2, ...]")
        for value in polygon:
            if type(value) not in (int, float):
                raise ValueError(f"{where}: a polygon holds {short(value)}, which is no number")
        margin = MARGIN * max(height, width)
        for values, side in ((polygon[::2], width), (polygon[1::2], height)):
            for value in values:
                if not -margin <= value <= side + margin:  # neither is NaN
                    raise ValueError(
                        f"{where}: a polygon reaches {short(value)}, far outside of the picture of {width} "
                        f"x {height} pixels; "
                        "does it belong to another picture, or to this one at another size?"
                    )
        smallest, largest = min(smallest, *polygon), max(largest, *polygon)
    if smallest >= 0 and largest <= 1 < max(height, width):
        raise ValueError(
            f"{where}: all coordinates lie in [0, 1], so they are shares of the picture; "
            f"multiply x by its width ({width}) and y by its height ({height})"
        )
    return union([_text(r) for r in coco.frPyObjects(polygons, height, width)])


def _from_matrix(rows: list[list[object]], *, where: str) -> RLE:
    for value in {
        value if isinstance(value, (int, float)) else short(value) for row in rows for value in row
    }:
        if value not in (0, 1, 255):
            raise ValueError(
                f"{where}: a matrix of the picture's size holds {value}; write 1 (or 255) for the object "
                "and 0 elsewhere"
            )
    return encode(np.array(rows, float) > 0)


def _text(rle: RLE) -> RLE:
    counts = rle["counts"]
    return {
        "size": list(rle["size"]),
        "counts": counts if isinstance(counts, str) else counts.decode("ascii"),
    }
