"""Promptable segmentation, as SAM2 is trained: a click or box on the first frame, masks in every frame, gradients through the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor, nn

from ans_core import rle, transforms
from ans_core.data.collate import TensorBatch, resize_mask
from ans_core.losses import mean_iou, promptable_loss
from ans_core.model.grounding import Bank, FrameFeatures, Grounding
from ans_core.types import Frames, Masklet


@dataclass(frozen=True, kw_only=True)
class PromptBatch(TensorBatch):
    """N objects in clips of F frames (an image: F = 1), prompted in frame 0."""

    frames: Float[Tensor, "Q 3 S S"]
    rows: Int[Tensor, "N F"]
    """Index into `frames` of object n's frame f."""
    coordinates: Float[Tensor, "N P 2"]
    labels: Int[Tensor, "N P"]
    """1: click inside; 2 and 3: corners of a box; -1: padding."""
    targets: Bool[Tensor, "N F S S"]


@dataclass(frozen=True, kw_only=True)
class MemoryBatch(TensorBatch):
    """Clips, and the pictures trained with them."""

    clips: PromptBatch
    pictures: PromptBatch


def prompt_batch(clips: Sequence[tuple[Frames, Sequence[Masklet]]], *, size: int, objects: int, frames: int, rng: Random) -> PromptBatch:
    """Choose up to `objects` objects of each clip over `frames` consecutive frames; the first frame shows the object if possible.

    Clips: (frames, masklets). Prompts: a uniform click in the mask or its box, with equal probability.
    """
    pictures: list[Image.Image] = []
    rows, coordinates, labels, targets = [], [], [], []
    for refs, masklets in clips:
        if len(refs) < frames:
            raise ValueError(f"a clip of {len(refs)} frames is too short to train on {frames}; draw longer ones (prepare.clip_frames)")
        start = rng.randrange(len(refs) - frames + 1)
        first = len(pictures)
        pictures += [transforms.open_image(ref) for ref in refs[start : start + frames]]
        seen = [m for m in masklets if (mask := m[start]) is not None and rle.area(mask) > 0]
        for masklet in rng.sample(seen, min(objects, len(seen))):
            masks = [resize_mask(rle.decode(m), size) for m in masklet[start : start + frames] if m is not None]
            if len(masks) < frames or not masks[0].any():
                continue
            points, kinds = _prompt(masks[0].numpy(), rng)
            rows.append(list(range(first, first + frames)))
            coordinates.append(points)
            labels.append(kinds)
            targets.append(torch.stack(masks))
    return PromptBatch(
        frames=transforms.normalise(pictures, size=size),
        rows=torch.tensor(rows, dtype=torch.long).reshape(-1, frames),
        coordinates=torch.tensor(coordinates, dtype=torch.float32).reshape(-1, 2, 2),
        labels=torch.tensor(labels, dtype=torch.int32).reshape(-1, 2),
        targets=torch.stack(targets) if targets else torch.zeros(0, frames, size, size, dtype=torch.bool),
    )


def _prompt(mask: Bool[np.ndarray, "S S"], rng: Random) -> tuple[list[list[float]], list[int]]:
    ys, xs = np.nonzero(mask)
    if rng.random() < 0.5:
        i = rng.randrange(len(xs))
        return [[float(xs[i]), float(ys[i])], [0.0, 0.0]], [1, -1]
    return [[float(xs.min()), float(ys.min())], [float(xs.max()), float(ys.max())]], [2, 3]


class Promptable(nn.Module):
    """SAM2's training loss of a PromptBatch, mean over the frames of the clip.

    SAM2 has four mask tokens: one for prompts of several points or a box, and three, of which it takes the best by predicted IoU, for a
    single click, for frames without a prompt, and for `[SEG]`. On the prompted frame all four learn the same target (what is drawn here is
    not ambiguous, and from random weights the best of three stays empty: LOG); on later frames the best of three learns, as in SAM2's
    training.
    """

    def __init__(self, sam2: Grounding) -> None:
        super().__init__()
        self.sam2 = sam2

    def forward(self, batch: PromptBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        features = self.sam2.encode(batch.frames)
        if not len(batch.rows):  # no object shows where the clips begin, and SAM2 can't decode nothing
            return 0 * self.sam2.high_res(features)[0].sum(), {"iou_single": 0.0, "iou_three": 0.0, "iou_last": 0.0}
        target = batch.targets[:, 0]
        first = self.sam2.decode_every(features, batch.rows[:, 0], (batch.coordinates, batch.labels))
        tokens = [promptable_loss(first.all_logits[:, [m]], first.ious[:, [m]], first.object_score, target) for m in range(4)]
        losses = [torch.stack(tokens).mean()]
        metrics = {"iou_single": mean_iou(first.all_logits[:, 0], target), "iou_three": mean_iou(first.logits, target)}
        metrics["iou_last"] = metrics["iou_three"]
        if batch.rows.shape[1] > 1:
            for index, out in enumerate(self._later_frames(features, batch), start=1):
                losses.append(promptable_loss(out["all_logits"], out["ious"], out["object_score"], batch.targets[:, index]))
                metrics["iou_last"] = mean_iou(out["pred_masks"][:, 0], batch.targets[:, index])
        return torch.stack(losses).mean(), metrics

    def _later_frames(self, features: FrameFeatures, batch: PromptBatch) -> Iterator[dict[str, Any]]:
        """Yield SAM2's record of every frame after the prompted one, each from the memory of those before it."""
        maps, frames = self.sam2.maps(features), batch.rows.shape[1]
        bank: Bank = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}
        prompt = {"point_coords": batch.coordinates, "point_labels": batch.labels}
        bank["cond_frame_outputs"][0] = self.sam2.step(maps, batch.rows[:, 0], 0, bank, prompt=prompt, frames=frames)
        for index in range(1, frames):
            remember = index < frames - 1
            out = self.sam2.step(maps, batch.rows[:, index], index, bank, frames=frames, remember=remember)
            bank["non_cond_frame_outputs"][index] = out
            yield out


class Memory(nn.Module):
    """Loss of clips plus loss of pictures. A decoder trained on images alone can't read what the memory adds, so it is trained with the
    memory; the pictures keep it good at clicks (LOG)."""

    def __init__(self, sam2: Grounding) -> None:
        super().__init__()
        self.promptable = Promptable(sam2)

    def forward(self, batch: MemoryBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        loss, metrics = self.promptable(batch.clips)
        picture_loss, found = self.promptable(batch.pictures)
        return loss + picture_loss, metrics | {"iou_picture": found["iou_last"]}
