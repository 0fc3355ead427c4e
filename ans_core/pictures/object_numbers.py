"""The numbers that the PNGs of a clip's masks hold -> which are objects, and whether they can be what the
clip's author meant."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from jaxtyping import UInt8

VOID = 255
"""Pixels that belong to no object and are not judged; they become background, as in DAVIS' own evaluation."""
SPARSE = 20
"""Numbers beside void that are this many times larger than their count are grey levels."""
FEWEST_EDGES = 3
"""Objects that may be thin or tiny without a doubt about the others are fewer."""


def is_binary(numbers: Collection[int]) -> bool:
    """Tell whether masks are 0 and 255 alone, as DAVIS 2016 and most tools write one object: 255 is that
    object then, number 1."""
    return VOID in numbers and set(numbers) <= {0, VOID}


def with_inside(labels: UInt8[np.ndarray, "H W"]) -> set[int]:
    """Return the numbers that have a pixel whose four neighbours have its number, too."""
    inner = labels[1:-1, 1:-1]
    same = (
        (inner == labels[:-2, 1:-1])
        & (inner == labels[2:, 1:-1])
        & (inner == labels[1:-1, :-2])
        & (inner == labels[1:-1, 2:])
    )
    return set(np.flatnonzero(np.bincount(inner[same], minlength=1)).tolist())


def smoothed(numbers: Collection[int], inside: Collection[int]) -> str:
    """Return what tells that masks were smoothed: most of their numbers are rims of others; "" if nothing
    does. `inside`: `with_inside` of any frame."""
    objects = set(numbers) - {0, VOID}
    edges = objects - set(inside)
    if len(edges) < FEWEST_EDGES or len(objects) >= 2 * len(edges) or max(objects) <= len(objects):
        return ""
    return (
        f"{len(objects)} object numbers, of which {len(edges)} are nothing but edges (as "
        f"{min(edges)}): the masks were "
        "scaled with interpolation, or saved as JPEG; scale them with nearest neighbour"
    )


def fault(numbers: Collection[int], inside: Collection[int]) -> str:
    """Return why a clip's numbers can't be those of objects, and what to do; "" if they can. `inside`:
    `with_inside` of any frame."""
    if why := smoothed(numbers, inside):
        return f"its PNGs hold {why}"
    objects = set(numbers) - {0, VOID}
    if objects and VOID in numbers and max(objects) > SPARSE * len(objects):
        shown = ", ".join(map(str, sorted(objects)[:5]))
        return (
            f"its PNGs hold {shown} and {VOID}, which look like grey levels of objects; {VOID} means void "
            f"(no object, not judged): number the objects 1, 2, ..., and write {VOID} for void alone"
        )
    return ""
