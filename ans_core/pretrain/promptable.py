"""Promptable segmentation of pictures, as SAM2 is trained first: clicks and boxes in, masks out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ans_core.data.collate import resize_mask
from ans_core.data.tensor_batch import TensorBatch
from ans_core.dist import Metrics
from ans_core.losses import mean_iou, promptable_loss
from ans_core.model.grounding import Grounding
from ans_core.pictures import rle, transforms
from ans_core.types import RLE, ImageRef


@dataclass(frozen=True, kw_only=True)
class PromptBatch(TensorBatch):
    """N objects of B pictures, each with its prompt."""

    pictures: Float[Tensor, "B 3 S S"]
    image: Int[Tensor, " N"]
    """Index of the picture that an object is in."""
    coordinates: Float[Tensor, "N P 2"]
    labels: Int[Tensor, "N P"]
    """1: click inside; 2 and 3: corners of a box; -1: padding."""
    targets: Bool[Tensor, "N S S"]


def prompt_batch(
    shown: Sequence[tuple[ImageRef, Sequence[RLE]]], *, size: int, objects: int, rng: Random
) -> PromptBatch:
    """Choose up to `objects` things of each picture (picture, masks) and prompt each by a uniform click in
    its mask or its box, with equal probability. A mask that has no pixel at this size is left out."""
    image, coordinates, labels, targets = [], [], [], []
    for place, (_, masks) in enumerate(shown):
        for mask in rng.sample(list(masks), min(objects, len(masks))):
            target = resize_mask(rle.decode(mask), size)
            if not target.any():
                continue
            points, kinds = _prompt(target.numpy(), rng)
            image.append(place)
            coordinates.append(points)
            labels.append(kinds)
            targets.append(target)
    return PromptBatch(
        pictures=transforms.normalise([transforms.open_image(ref) for ref, _ in shown], size=size),
        image=torch.tensor(image, dtype=torch.long),
        coordinates=torch.tensor(coordinates, dtype=torch.float32).reshape(-1, 2, 2),
        labels=torch.tensor(labels, dtype=torch.int32).reshape(-1, 2),
        targets=torch.stack(targets) if targets else torch.zeros(0, size, size, dtype=torch.bool),
    )


def _prompt(mask: Bool[np.ndarray, "S S"], rng: Random) -> tuple[list[list[float]], list[int]]:
    ys, xs = np.nonzero(mask)
    if rng.random() < 0.5:
        i = rng.randrange(len(xs))
        return [[float(xs[i]), float(ys[i])], [0.0, 0.0]], [1, -1]
    return [[float(xs.min()), float(ys.min())], [float(xs.max()), float(ys.max())]], [2, 3]


class Promptable(nn.Module):
    """SAM2's training loss of a PromptBatch.

    SAM2 has four mask tokens: one for prompts of several points or a box, and three, of which it takes the
    best by predicted IoU, for a single click, for frames without a prompt, and for `[SEG]`. All four learn
    the same target: what is drawn here is not ambiguous, and from random weights the best of three stays
    empty (LOG).
    """

    def __init__(self, sam2: Grounding) -> None:
        super().__init__()
        self.sam2 = sam2

    def forward(self, batch: PromptBatch) -> tuple[Float[Tensor, ""], Metrics]:
        features = self.sam2.encode(batch.pictures)
        if not len(batch.image):  # nothing to click on, and SAM2 can't decode nothing
            return 0 * self.sam2.high_res(features)[0].sum(), {"iou_single": 0.0, "iou_three": 0.0}
        predicted = self.sam2.decode_every(features, batch.image, (batch.coordinates, batch.labels))
        losses = [
            promptable_loss(
                predicted.all_logits[:, [m]], predicted.ious[:, [m]], predicted.object_score, batch.targets
            )
            for m in range(4)
        ]
        ious: Metrics = {
            "iou_single": mean_iou(predicted.all_logits[:, 0], batch.targets),
            "iou_three": mean_iou(predicted.logits, batch.targets),
        }
        return torch.stack(losses).mean(), ious
