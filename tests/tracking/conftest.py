from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ans_core.config.memory import MemoryPrompts
from ans_core.model.grounding import Grounding
from ans_core.tracking.batch import ClipTensors, TrackingBatch, make_batch
from ans_core.tracking.clips import Clips, load_window
from tests import tiny


@pytest.fixture
def sam2() -> Grounding:
    """A SAM 2.1 in training mode, image encoder frozen, whose objects count as present: only then masks and
    pointers carry gradients."""
    torch.manual_seed(0)
    model = Grounding(replace(tiny.GROUNDING, temporal_pointers=True))
    with torch.no_grad():
        model.sam_mask_decoder.pred_obj_score_head.layers[-1].bias += 5
    model.image_encoder.requires_grad_(False)
    return model.train()


def clip_tensors(number: int = 0, frames: int = 4) -> ClipTensors:
    """A square that moves to the right."""
    [clip] = Clips([[tiny.clip(number, frames)]])
    return load_window(clip, range(frames), size=64, max_objects=0, rng=random.Random(0))


def batch_of(
    kind: str = "box", *, frames: int = 4, count: int = 2, seed: int = 0, at_once: int = 16, **options: object
) -> TrackingBatch:
    clips = [clip_tensors(number, frames) for number in range(count)]
    return make_batch(
        clips,
        MemoryPrompts(kinds={kind: 1.0}, **options),
        at_once=at_once,
        rngs=[random.Random(seed + n) for n in range(count)],
    )  # type: ignore
