"""Clips of pixels and masks in, one TrackingBatch out: objects of several clips with their targets, grouped
by how they are prompted and by the frames in which they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ans_core.config.memory import MemoryPrompts
from ans_core.data.tensor_batch import TensorBatch
from ans_core.tracking.simulator import Points, PromptKind, points_for


@dataclass(frozen=True, kw_only=True)
class ClipTensors:
    """F frames of one clip at the model's size, and N of its objects."""

    pixels: Float[Tensor, "F 3 S S"]
    masks: Bool[Tensor, "N F S S"]
    has_truth: Bool[Tensor, "N F"]
    """Whether the frame has ground truth for the object. An empty mask with ground truth says that the
    object is not there."""


@dataclass(frozen=True, kw_only=True)
class PromptedObjects(TensorBatch):
    """Objects that are prompted in the same way in the same frames."""

    objects: Int[Tensor, " K"]
    """Index into the batch's objects."""
    kind: PromptKind
    frames: list[int]
    """The conditioning frames, in order of time."""
    coordinates: Float[Tensor, "K C P 2"]
    """Points in pixels of the model's image; P = 0 for masks, which are the targets of these frames."""
    labels: Int[Tensor, "K C P"]
    clicks: int


@dataclass(frozen=True, kw_only=True)
class TrackingBatch(TensorBatch):
    """N objects in clips of F frames."""

    frames: Float[Tensor, "Q 3 S S"]
    rows: Int[Tensor, "N F"]
    """Index into `frames` of object n's frame f."""
    targets: Bool[Tensor, "N F S S"]
    has_truth: Bool[Tensor, "N F"]
    tracks: list[list[PromptedObjects]]
    """Groups that are prompted in the same frames: each is prompted by itself, and SAM2 follows the objects
    of all of them together."""
    total: int = 0
    """Predictions of all micro-batches and processes of the step, by which the loss is divided; 0: those of
    this batch."""


def make_batch(
    clips: Sequence[ClipTensors], prompts: MemoryPrompts, *, at_once: int = 16, rngs: Sequence[Random]
) -> TrackingBatch:
    """Put clips of equal length into one batch and prompt every object in the first frame that shows it (all
    must show before the end). at_once: most objects that SAM2 takes in one pass; more are divided among several.

    An object that enters late is prompted late; nothing is asked of it before. A frame without its ground
    truth prompts nothing. A clip's prompts depend on its own random numbers alone.
    """
    length = len(clips[0].pixels)
    rows: list[Tensor] = []
    plans: dict[tuple[PromptKind, tuple[int, ...]], list[tuple[int, list[Points]]]] = defaultdict(list)
    for number, (clip, rng) in enumerate(zip(clips, rngs, strict=True)):
        kind = rng.choices(list(prompts.kinds), weights=list(prompts.kinds.values()))[0]
        second = rng.randrange(1, length) if rng.random() < prompts.second_frame else None
        for masks, has_truth in zip(clip.masks, clip.has_truth, strict=True):
            first = int((masks.flatten(1).any(1) & has_truth).int().argmax())
            frames = (
                [first, second] if second is not None and second > first and has_truth[second] else [first]
            )
            points = [_points(masks[f], kind, prompts, rng=rng) for f in frames]
            plans[kind, tuple(frames)].append((len(rows), points))
            rows.append(torch.arange(number * length, (number + 1) * length))
    tracks: dict[tuple[int, ...], list[list[PromptedObjects]]] = defaultdict(list)
    for (kind, prompted), planned in plans.items():
        for start in range(0, len(planned), at_once):
            group = _group(kind, list(prompted), planned[start : start + at_once], clicks=prompts.clicks)
            alike = tracks[prompted]
            if not alike or sum(len(other.objects) for other in (*alike[-1], group)) > at_once:
                alike.append([])
            alike[-1].append(group)
    return TrackingBatch(
        frames=torch.cat([clip.pixels for clip in clips]),
        rows=torch.stack(rows),
        targets=torch.cat([clip.masks for clip in clips]),
        has_truth=torch.cat([clip.has_truth for clip in clips]),
        tracks=list(chain.from_iterable(tracks.values())),
    )


def _points(mask: Bool[Tensor, "S S"], kind: PromptKind, prompts: MemoryPrompts, *, rng: Random) -> Points:
    if kind == "mask":
        return [], []
    return points_for(
        mask.numpy(), kind, count=prompts.num_pos_points, include_center=prompts.include_center, rng=rng
    )


def _group(
    kind: PromptKind, frames: list[int], planned: Sequence[tuple[int, list[Points]]], *, clicks: int
) -> PromptedObjects:
    count = len(planned)
    return PromptedObjects(
        objects=torch.tensor([n for n, _ in planned]),
        kind=kind,
        frames=frames,
        coordinates=torch.tensor([[places for places, _ in prompts] for _, prompts in planned]).reshape(
            count, len(frames), -1, 2
        ),
        labels=torch.tensor(
            [[labels for _, labels in prompts] for _, prompts in planned], dtype=torch.int32
        ).reshape(count, len(frames), -1),
        clicks=0 if kind == "mask" else clicks,
    )


def predictions(batch: TrackingBatch) -> int:
    """Count what a loss is taken of: every object, frame with ground truth from its prompt on, and
    correction. A given mask is none."""
    count = 0
    for group in chain.from_iterable(batch.tracks):
        per_frame = batch.has_truth[group.objects].sum(0).tolist()
        for index in range(group.frames[0], len(per_frame)):
            prompted = index in group.frames
            count += (
                0 if prompted and group.kind == "mask" else per_frame[index] * (1 + group.clicks * prompted)
            )
    return count
