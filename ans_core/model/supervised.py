"""The supervised objective: a Batch in, text cross-entropy + mask losses out. Pre-training and SFT differ
only in what is trainable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ans_core.data.collate import Batch, Layout
from ans_core.data.views import Views
from ans_core.dist import Metrics, shared_sum
from ans_core.losses import mask_losses, mean_iou, text_loss
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.checkpointing import in_pieces
from ans_core.model.grounding import MaskOutput
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.train import sharding


class Supervised(nn.Module):
    """text + mask_weight * BCE + dice_weight * dice + object_weight * BCE of the object score, which is 1 in
    frames that show the object. Frozen encoders run once per image, without a graph.

    Text is a mean over learned tokens, the mask losses are means over masks: over those of the whole step,
    which `begin_step` counts: the losses of its micro-batches on all processes add up to the loss of one
    process with all the rows.
    """

    def __init__(
        self,
        model: Network,
        *,
        mask_weight: float,
        dice_weight: float,
        points: int,
        object_weight: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.mask_weight, self.dice_weight, self.points = mask_weight, dice_weight, points
        self.object_weight = object_weight

    def begin_step(self, batches: Sequence[Batch]) -> list[Batch]:
        """Tell this process's micro-batches of a step what the whole step holds. All processes must call
        it."""
        counted = torch.tensor(
            [[float(b.learned.shape[1]), float(len(b.pair_seg))] for b in batches], dtype=torch.float64
        ).sum(0)
        tokens, masks = shared_sum(counted, self.model.device).tolist()
        return [replace(batch, totals={"tokens": tokens, "masks": masks}) for batch in batches]

    def forward(self, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        """This batch's part of the step's loss. Metrics are means over this batch; whoever reads them waits
        for the device."""
        hidden = self.states(batch)
        rows, places = batch.learned
        text = self.text_loss(hidden[rows, places - 1], batch.input_ids[rows, places])
        metrics: Metrics = {"text": text.detach()} if len(rows) else {}
        loss = text * (len(rows) / (batch.totals.get("tokens", len(rows)) or 1))
        if not self.mask_weight and not self.dice_weight:
            return loss, metrics
        out = self.decode_masks(batch, hidden)
        logits, count = out.logits, len(batch.pair_seg)
        if not count:
            unread = logits.sum() + (out.object_score.sum() if self.object_weight else 0.0)
            return loss + 0.0 * unread, metrics
        total = batch.totals.get("masks", float(count))
        bce, dice = mask_losses(
            logits, batch.targets, points=self.points, seeds=batch.pair_seeds, total=total
        )
        share = total / count
        metrics |= {"bce": bce.detach() * share, "dice": dice.detach() * share}
        metrics["mask_iou"] = mean_iou(logits.detach(), batch.targets)
        loss = loss + self.mask_weight * bce + self.dice_weight * dice
        if self.object_weight:
            present = batch.targets.flatten(1).any(1).float()
            missed = F.binary_cross_entropy_with_logits(out.object_score.float(), present, reduction="sum")
            metrics["object"] = missed.detach() / count
            loss = loss + self.object_weight * missed / total
        return loss, metrics

    def states(self, batch: Batch) -> Float[Tensor, "B L D"]:
        images = image_tokens(self.model, batch.views).split(batch.views)
        return self.model.hidden_states(packed(batch), images)

    def text_loss(self, hidden: Float[Tensor, "M D"], target: Int[Tensor, " M"]) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of the learned tokens, whose logits are made piece by piece where
        they are many."""

        def share(some: Tensor, targets: Tensor) -> tuple[Tensor]:
            return (text_loss(self.model.logits(some), targets)[None] * (len(targets) / max(len(target), 1)),)

        if sharding.is_divided(self.model.vlm.lm_head.weight):  # every process must use it equally often
            return share(hidden, target)[0].sum()
        return in_pieces(share, hidden, target, words=self.model.vocabulary)[0].sum()

    def decode_masks(self, batch: Batch, hidden: Float[Tensor, "B L D"]) -> MaskOutput:
        """Masks of every (seg, frame) pair of the batch. Without any, of one token on a blank frame, for the
        graph alone: processes wait for each other's gradients of every trained part, in the same order."""
        encoder = self.model.sam2.image_encoder
        if not len(batch.pair_seg):
            embeddings = self.model.seg_embeddings(hidden[0, :1])
            # the others gather its weights, with all processes
            if any(sharding.is_divided(p) for p in encoder.parameters()):
                side = self.model.sam2.image_size
                with torch.no_grad():
                    self.model.sam2.encode(torch.zeros(1, 3, side, side, device=hidden.device))
            blank = self.model.sam2.blank_features(hidden)
            return self.model.sam2.decode(
                blank, torch.zeros(1, dtype=torch.long, device=hidden.device), embeddings
            )
        rows, places = batch.segs
        embeddings = self.model.seg_embeddings(hidden[rows, places])
        with torch.set_grad_enabled(any(p.requires_grad for p in encoder.parameters())):
            features = self.model.sam2.encode(batch.sam_frames)
        return self.model.sam2.decode(features, batch.pair_frame, embeddings[batch.pair_seg])


def layout_of(model: Network, *, mask_size: int, max_length: int, objects: int = 0) -> Layout:
    """How this model wants its batches."""
    return Layout(
        template=model.config.template,
        cutter=model.backbone.cutter,
        marks=model.backbone.marks,
        sam_size=model.sam2.image_size,
        mask_size=mask_size,
        max_length=max_length,
        objects=objects,
        multiple=model.length_multiple,
    )


def packed(batch: Batch) -> Packed:
    return Packed(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        branch=batch.branch,
        loss_mask=batch.loss_mask,
        regions=batch.regions,
        places=batch.places,
        slots=batch.slots,
    )


def image_tokens(model: Network, rows: Sequence[Views]) -> ImageFeatures:
    """Image tokens of all rows; the vision tower keeps a graph only where it is trained."""
    with torch.set_grad_enabled(any(p.requires_grad for p in model.backbone.vision_tower.parameters())):
        features = model.vision_features(rows)
    return model.project(features)
