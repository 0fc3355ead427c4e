"""The supervised objective: a Batch in, text cross-entropy + mask losses out. Pre-training and SFT differ only in what is trainable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ans_core.data.collate import Batch, Layout
from ans_core.data.views import Views
from ans_core.dist import shared_sum
from ans_core.losses import mask_losses, mean_iou, text_loss
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.packing import Packed
from ans_core.model.sa2va import Sa2VA


class Supervised(nn.Module):
    """text + mask_weight * BCE + dice_weight * dice. Frozen encoders run once per image, without a graph.

    Text is a mean over learned tokens, the mask losses are means over masks: over those of the whole step, which `begin_step` counts: the
    losses of its micro-batches on all processes add up to the loss of one process with all the rows.
    """

    def __init__(self, model: Sa2VA, *, mask_weight: float, dice_weight: float, points: int) -> None:
        super().__init__()
        self.model = model
        self.mask_weight, self.dice_weight, self.points = mask_weight, dice_weight, points

    def begin_step(self, batches: Sequence[Batch]) -> list[Batch]:
        """Tell this process's micro-batches of a step what the whole step holds. All processes must call it."""
        counted = torch.tensor([[float(b.loss_mask.sum()), float(len(b.pair_seg))] for b in batches], dtype=torch.float64).sum(0)
        tokens, masks = shared_sum(counted, self.model.device).tolist()
        return [replace(batch, totals={"tokens": tokens, "masks": masks}) for batch in batches]

    def forward(self, batch: Batch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """This batch's part of the step's loss. Metrics are means over this batch."""
        hidden = self.states(batch)
        rows, places = target_positions(batch)
        text = text_loss(self.model.logits(hidden[rows, places - 1]), batch.input_ids[rows, places])
        metrics = {"text": float(text.detach())} if len(rows) else {}
        loss = text * (len(rows) / (batch.totals.get("tokens", len(rows)) or 1))
        if not self.mask_weight and not self.dice_weight:
            return loss, metrics
        logits = self.decode_masks(batch, hidden)
        count = len(batch.pair_seg)
        if not count:
            return loss + 0.0 * logits.sum(), metrics
        total = batch.totals.get("masks", float(count))
        bce, dice = mask_losses(logits, batch.targets, points=self.points, seeds=batch.pair_seeds, total=total)
        share = total / count
        metrics |= {"bce": float(bce.detach()) * share, "dice": float(dice.detach()) * share}
        metrics["mask_iou"] = mean_iou(logits.detach(), batch.targets)
        return loss + self.mask_weight * bce + self.dice_weight * dice, metrics

    def states(self, batch: Batch) -> Float[Tensor, "B L D"]:
        return self.model.hidden_states(packed(batch), image_tokens(self.model, batch.views).split(batch.views))

    def decode_masks(self, batch: Batch, hidden: Float[Tensor, "B L D"]) -> Float[Tensor, "P h4 w4"]:
        """Mask logits of every (seg, frame) pair of the batch. Without any, of one token on a blank frame, for the graph alone: processes
        wait for each other's gradients of every trained part, in the same order."""
        if not len(batch.pair_seg):
            blank = self.model.sam2.blank_features(hidden)
            return self.model.sam2.decode(
                blank, torch.zeros(1, dtype=torch.long, device=hidden.device), self.model.seg_embeddings(hidden[0, :1])
            ).logits
        embeddings = self.model.seg_embeddings(hidden[(batch.input_ids == self.model.seg_token_id) & batch.loss_mask])
        with torch.set_grad_enabled(any(p.requires_grad for p in self.model.sam2.image_encoder.parameters())):
            features = self.model.sam2.encode(batch.sam_frames)
        return self.model.sam2.decode(features, batch.pair_frame, embeddings[batch.pair_seg]).logits


def layout_of(model: Sa2VA, *, mask_size: int, max_length: int) -> Layout:
    """How this model wants its batches."""
    return Layout(
        template=model.config.template,
        cutter=model.backbone.cutter,
        marks=model.backbone.marks,
        sam_size=model.sam2.image_size,
        mask_size=mask_size,
        max_length=max_length,
    )


def packed(batch: Batch) -> Packed:
    return Packed(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        branch=batch.branch,
        loss_mask=batch.loss_mask,
        regions=batch.regions,
    )


def image_tokens(model: Sa2VA, rows: Sequence[Views]) -> ImageFeatures:
    """Image tokens of all rows; the vision tower keeps a graph only where it is trained."""
    with torch.set_grad_enabled(any(p.requires_grad for p in model.backbone.vision_tower.parameters())):
        features = model.vision_features(rows)
    return model.project(features)


def target_positions(batch: Batch) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """(row, place) of every learned token; its prediction stands one place before (answers never begin a branch)."""
    rows, places = batch.loss_mask.nonzero(as_tuple=True)
    return rows, places
