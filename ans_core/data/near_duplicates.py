"""Pictures of two splits -> those that look alike: the same photograph cropped a little, scaled or compressed
anew.

Each picture becomes 128 bits (dHash): whether a pixel of its 9 x 9 grey thumbnail is darker than its right
and than its lower neighbour. Pictures are alike if at most NEAR bits differ. Flat pictures say nothing and
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
from jaxtyping import UInt64
from PIL import Image
from tqdm import tqdm

from ans_core.data.facts import shown_frames
from ans_core.pictures import transforms
from ans_core.types import ImageRef, Sample

SIDE = 8
NEAR = 6
"""Bits; two unrelated photographs differ in about 64."""
FLAT = 2.0
"""Standard deviation of a flat picture's grey values, out of 255."""
Pair = tuple[ImageRef, ImageRef]


def near_duplicates(read: Mapping[str, Sequence[Sample]]) -> dict[tuple[str, str], list[Pair]]:
    """Compare every two splits, but not a file with itself. Of a clip the first, middle and last frame count.
    A picture of the later split is named once."""
    hashes: dict[str, list[tuple[ImageRef, int]]] = {}
    with ThreadPoolExecutor() as threads:
        for split, samples in read.items():
            refs = list(
                dict.fromkeys(sample.frames[place] for sample in samples for place in shown_frames(sample))
            )
            values = tqdm(
                threads.map(dhash, refs), desc=f"compare pictures of {split}", total=len(refs), mininterval=1
            )
            hashes[split] = [
                (ref, value) for ref, value in zip(refs, values, strict=True) if value is not None
            ]
    return {(one, other): list(_pairs(hashes[one], hashes[other])) for one, other in combinations(hashes, 2)}


def dhash(ref: ImageRef) -> int | None:
    """Return the 128 bits, None for a flat picture."""
    small = transforms.open_image(ref).convert("L").resize((SIDE + 1, SIDE + 1), Image.Resampling.BOX)
    grey = np.asarray(small).astype(np.int16)
    if grey.std() < FLAT:
        return None
    bits = np.concatenate(
        [(grey[:SIDE, 1:] > grey[:SIDE, :-1]).ravel(), (grey[1:, :SIDE] > grey[:-1, :SIDE]).ravel()]
    )
    return int.from_bytes(np.packbits(bits).tobytes())


def _pairs(one: Sequence[tuple[ImageRef, int]], other: Sequence[tuple[ImageRef, int]]) -> Iterator[Pair]:
    """Compare all with all: to hash the pictures takes longer."""
    left, right = _halves(one)
    for (ref, _), first, second in zip(other, *_halves(other), strict=True):
        near = np.flatnonzero(np.bitwise_count(left ^ first) <= NEAR)
        unlike_bits = np.bitwise_count(left[near] ^ first) + np.bitwise_count(right[near] ^ second)
        alike = (one[c][0] for c in near[unlike_bits <= NEAR] if one[c][0] != ref)
        if (first_alike := next(alike, None)) is not None:
            yield first_alike, ref


def _halves(hashes: Sequence[tuple[ImageRef, int]]) -> UInt64[np.ndarray, "2 N"]:
    """Return the 128 bits as two numbers."""
    joined = b"".join(value.to_bytes(16, "little") for _, value in hashes)
    return np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2).T.copy()
