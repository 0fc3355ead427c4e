"""What a selection of samples depends on, as small numbers: kept in an index, so that none of a million
samples is read to select some."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import get_args

import numpy as np
from jaxtyping import UInt16

from ans_core.pictures import rle
from ans_core.types import Sample, Task

TASKS: tuple[str, ...] = get_args(Task)


def outline_of(sample: Sample) -> int:
    """Return a number that is equal for samples of one task with as many frames and masks (0, 1 or more),
    whose masks are known alike in the first frame, and that have a text alike. Whether a loop of RL takes a
    sample depends on nothing else."""
    annotated = [masklet[0] is not None for masklet in sample.masks]
    parts = (
        (TASKS.index(sample.task), 8), (min(len(sample.frames), 2), 3), (min(len(sample.masks), 2), 3),
        (bool(annotated and annotated[0]), 2),
        (any(annotated), 2), (bool(sample.text), 2),
    )  # fmt: skip
    number = 0
    for value, values in parts:
        number = number * values + value
    return number


def representatives(outlines: UInt16[np.ndarray, " samples"]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield for every outline the number of its first sample, and which samples have it."""
    distinct, firsts = np.unique(outlines, return_index=True)
    for outline, first in zip(distinct, firsts, strict=True):
        yield int(first), outlines == outline


def unnamed_regions(sample: Sample) -> list[int]:
    """Return the places of the masks of a still picture whose objects have no words (`tracking`: SA-1B), but
    for empty ones."""
    if sample.task != "tracking" or len(sample.frames) != 1:
        return []
    return [n for n, masklet in enumerate(sample.masks) if masklet[0] is not None and rle.area(masklet[0])]


def thing_of(sample: Sample, picture: bytes) -> bytes:
    """Return 16 bytes for the one thing of one frame that a sample is about, equal where picture and mask
    are; nothing for another sample. picture: the digest of the frames."""
    if not len(sample.frames) == len(sample.masks) == 1 or sample.masks[0][0] is None:
        return b""
    return digest_of_thing(picture, sample)


def digest_of_thing(picture: bytes, sample: Sample) -> bytes:
    """Return the same for the first mask in the first frame, which must be known."""
    mask = sample.masks[0][0]
    assert mask is not None, sample.sample_id
    return hashlib.blake2b(picture + f"{mask['size']} {mask['counts']}".encode(), digest_size=16).digest()
