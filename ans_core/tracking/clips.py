"""Samples in, clips with identified objects out; a clip in, a window of frames and masks at the model's size
out."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from random import Random

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from ans_core.data.collate import resize_mask
from ans_core.data.index import by_picture, picture_keys
from ans_core.lazy import Lazy
from ans_core.pictures import rle, transforms
from ans_core.tracking.batch import ClipTensors
from ans_core.tracking.simulator import center_at
from ans_core.types import RLE, ImageRef, Masklet, Sample


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A video, or a still (one frame), with the objects that its annotation tells apart; equal masklets are
    one object."""

    name: str
    """Data set and video, for errors."""
    frames: Sequence[ImageRef]
    masklets: tuple[Masklet, ...]
    joined: int = 0
    """Number of masklets that are no single object and therefore not among these (`Sample.meta`)."""

    @cached_property
    def visible(self) -> Bool[np.ndarray, "N F"]:
        """Whether the ground truth shows an object in a frame."""
        return self._table(
            [[mask is not None and rle.area(mask) > 0 for mask in masklet] for masklet in self.masklets]
        )

    @cached_property
    def has_truth(self) -> Bool[np.ndarray, "N F"]:
        """Whether a frame has ground truth for an object, be it that the object is not there."""
        return self._table([[mask is not None for mask in masklet] for masklet in self.masklets])

    def _table(self, rows: list[list[bool]]) -> Bool[np.ndarray, "N F"]:
        return np.array(rows, bool).reshape(len(rows), len(self.frames))

    def followed(self, window: Sequence[int]) -> list[int]:
        """List the objects that some frame of a window shows and a later one has ground truth for."""
        chosen = list(window)
        truth_later = np.flip(np.logical_or.accumulate(np.flip(self.has_truth[:, chosen], 1), 1), 1)[:, 1:]
        return np.flatnonzero((self.visible[:, chosen][:, :-1] & truth_later).any(1)).tolist()


JOINED = (
    "its masks stand for several objects each: crowds, or a category whose annotation has no instance_id or "
    "track_id"
)
"""Why a picture or video without a single object is left out."""


class Clips(Lazy[Clip]):
    """Every video and still of some sequences of samples with all its objects (those without any included),
    in the order of the samples.

    A clip is put together each time it is asked for, so what is kept in memory is numbers: 25 bytes a sample.
    """

    def __init__(self, sources: Sequence[Sequence[Sample]]) -> None:
        self._sources = sources
        self._firsts = np.cumsum([0, *map(len, sources)])
        self._samples, self._bounds = by_picture(
            np.concatenate([np.array([], "S16"), *map(picture_keys, sources)])
        )
        self._pictures = np.arange(len(self._bounds) - 1)

    def at(self, numbers: Sequence[int]) -> Clips:
        """Return these clips alone."""
        chosen = copy(self)
        chosen._pictures = self._pictures[np.array(numbers, np.int64)]
        return chosen

    def __len__(self) -> int:
        return len(self._pictures)

    def item(self, number: int) -> Clip:
        picture = self._pictures[number]
        samples = [
            self._sample(int(number))
            for number in self._samples[self._bounds[picture] : self._bounds[picture + 1]]
        ]
        objects: list[Masklet] = []
        joined: list[Masklet] = []
        for sample in samples:
            several = sample.meta.get("joined", ())
            for place, masklet in enumerate(sample.masks):
                group = joined if place in several else objects
                if masklet not in group:
                    group.append(masklet)
        shown, others = samples[0], sum(masklet not in objects for masklet in joined)
        return Clip(
            name=f"{shown.dataset}/{shown.image_id}",
            frames=shown.frames,
            masklets=tuple(objects),
            joined=others,
        )

    def _sample(self, number: int) -> Sample:
        source = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._sources[source][number - int(self._firsts[source])]


def why_left_out(clip: Clip, *, length: int) -> str:
    """Say why a video can't be trained on: no single object, too short, or no object to be followed; empty if
    it can."""
    if clip.joined and not clip.masklets:
        return f"{clip.name}: {JOINED}"
    if len(clip.frames) < length:
        return f"{clip.name}: {len(clip.frames)} frames, fewer than memory.frames = {length}"
    if not _starts(clip, length=length, gap=1):
        return f"{clip.name}: in no {length} frames an object is seen that a later one has ground truth for"
    return ""


def _starts(clip: Clip, *, length: int, gap: int) -> list[int]:
    """List the first frames of windows with something to follow."""
    span = (length - 1) * gap
    return [s for s in range(len(clip.frames) - span) if clip.followed(range(s, s + span + 1, gap))]


def choose_window(clip: Clip, *, length: int, max_gap: int, rng: Random) -> list[int]:
    """Choose frames of a clip: `length` of them, `gap` apart, the gap uniform among those up to `max_gap`
    that the clip allows."""
    starts = {
        gap: firsts for gap in range(1, max_gap + 1) if (firsts := _starts(clip, length=length, gap=gap))
    }
    if not starts:
        raise ValueError(
            f"{clip.name}: no window of {length} frames shows an object that a later one has ground truth for"
        )
    gap = rng.choice(list(starts))
    first = rng.choice(starts[gap])
    return list(range(first, first + (length - 1) * gap + 1, gap))


def load_window(
    clip: Clip, window: Sequence[int], *, size: int, max_objects: int, rng: Random
) -> ClipTensors:
    """Open frames and masks of a window at size x size. Objects: those that can be followed in it, at most
    `max_objects` of them (0: all).

    A mask too small to leave a pixel at this size keeps the one in its middle. Raises ValueError naming clip
    and frame for a mask that has another size than its frame.
    """
    opened = {index: transforms.open_image(clip.frames[index]) for index in dict.fromkeys(window)}
    pictures = [opened[index] for index in window]
    chosen = clip.followed(window)
    if max_objects and len(chosen) > max_objects:
        chosen = sorted(rng.sample(chosen, max_objects))
    masks = torch.zeros(len(chosen), len(window), size, size, dtype=torch.bool)
    has_truth = torch.zeros(len(chosen), len(window), dtype=torch.bool)
    for place, n in enumerate(chosen):
        for f, (index, picture) in enumerate(zip(window, pictures, strict=True)):
            coded = clip.masklets[n][index]
            if coded is not None:
                masks[place, f] = _resized(
                    coded, (picture.height, picture.width), size, f"{clip.name}, frame {index}"
                )
                has_truth[place, f] = True
    return ClipTensors(pixels=transforms.normalise(pictures, size=size), masks=masks, has_truth=has_truth)


def _resized(coded: RLE, picture: tuple[int, int], size: int, where: str) -> Bool[Tensor, "S S"]:
    if tuple(coded["size"]) != picture:
        raise ValueError(
            f"{where}: the mask is {coded['size'][1]} x {coded['size'][0]}, the frame {picture[1]} x "
            f"{picture[0]}; is it the mask of another frame, or of this one at another size?"
        )
    full = rle.decode(coded)
    mask = resize_mask(full, size)
    if full.any() and not mask.any():
        mask[center_at(full, size)] = True
    return mask
