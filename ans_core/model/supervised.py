"""The supervised objective: a Batch in, text cross-entropy + mask losses out. Pre-training and SFT differ only in what is trainable."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ans_core.data.collate import Batch, Layout
from ans_core.losses import mask_losses, mean_iou, text_loss
from ans_core.model.packing import Packed
from ans_core.model.sa2va import Sa2VA


class Supervised(nn.Module):
    """text + mask_weight * BCE + dice_weight * dice. Frozen encoders run once per image, without a graph."""

    def __init__(self, model: Sa2VA, *, mask_weight: float, dice_weight: float, points: int) -> None:
        super().__init__()
        self.model = model
        self.mask_weight, self.dice_weight, self.points = mask_weight, dice_weight, points

    def forward(self, batch: Batch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        hidden = self.model.hidden_states(packed(batch), project_tiles(self.model, batch))
        rows, places = target_positions(batch)
        text = text_loss(self.model.logits(hidden[rows, places - 1]), batch.input_ids[rows, places])
        metrics = {"text": float(text.detach())}
        if not len(batch.pair_seg):
            return text, metrics
        logits = self.decode_masks(batch, hidden)
        bce, dice = mask_losses(logits, batch.targets, points=self.points)
        metrics |= {"bce": float(bce.detach()), "dice": float(dice.detach()), "mask_iou": mean_iou(logits.detach(), batch.targets)}
        return text + self.mask_weight * bce + self.dice_weight * dice, metrics

    def decode_masks(self, batch: Batch, hidden: Float[Tensor, "B L D"]) -> Float[Tensor, "P h4 w4"]:
        """Mask logits of every (seg, frame) pair of the batch."""
        embeddings = self.model.seg_embeddings(hidden[(batch.input_ids == self.model.seg_token_id) & batch.loss_mask])
        with torch.set_grad_enabled(any(p.requires_grad for p in self.model.sam2.image_encoder.parameters())):
            features = self.model.sam2.encode(batch.sam_frames)
        return self.model.sam2.decode(features, batch.pair_frame, embeddings[batch.pair_seg]).logits


def layout_of(model: Sa2VA, *, mask_size: int, max_length: int) -> Layout:
    """How this model wants its batches."""
    return Layout(
        template=model.config.template,
        tile_size=model.tile_size,
        grid=model.grid,
        max_tiles=model.config.max_tiles,
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
        clips=batch.clips,
    )


def project_tiles(model: Sa2VA, batch: Batch) -> list[Float[Tensor, "_ n D"]]:
    """Image tokens of every row; the vision tower keeps a graph only where it is trained."""
    with torch.set_grad_enabled(any(p.requires_grad for p in model.internvl.model.vision_tower.parameters())):
        features = model.vision_features(batch.tiles)
    return list(model.project(features).split(batch.tiles_per_row))


def target_positions(batch: Batch) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """(row, place) of every learned token; its prediction stands one place before (answers never begin a branch)."""
    rows, places = batch.loss_mask.nonzero(as_tuple=True)
    return rows, places
