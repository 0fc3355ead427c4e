"""Masks of a step's pictures: hidden states or texts in, logits and masks out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ans_core.losses import mask_losses
from ans_core.metrics.mask import soft_iou
from ans_core.model.grounding import MaskOutput
from ans_core.model.masks import upsample
from ans_core.model.packing import Packed
from ans_core.pictures import rle
from ans_core.rewards.confidence import MaskPrediction
from ans_core.rl.batch import EncodedBatch
from ans_core.rl.mask_policy import mean_probability
from ans_core.rl.rollout import Group
from ans_core.rl.step import RolloutStep
from ans_core.rl.tokens import group_of, hidden_states, referring_rollout
from ans_core.types import RLE


def decode_seg(step: EncodedBatch, packed: Packed, hidden: Float[Tensor, "B L D"]) -> MaskOutput:
    """Return the masks that every row's `[SEG]` tokens decode to."""
    at = (packed.input_ids == step.model.seg_token_id) & packed.loss_mask
    embeddings = step.model.seg_embeddings(hidden[at])
    return step.model.sam2.decode(step.frames, at.nonzero()[:, 0], embeddings)


def mask_loss(
    step: RolloutStep, logits: Float[Tensor, "P h w"], targets: Bool[Tensor, "P M M"], samples: Sequence[int]
) -> Float[Tensor, ""]:
    """Return BCE and dice loss of the masks of these samples (their indices), weighted as in SFT. The
    random points of a sample are seeded by the sample, so they don't depend on its process."""
    bce, dice = mask_losses(
        logits, targets, points=step.mask_points, seeds=[step.seed("mask points", i) for i in samples]
    )
    return step.mask_losses[0] * bce + step.mask_losses[1] * dice


def drawn(
    pictures: EncodedBatch, texts: Sequence[Sequence[str]]
) -> tuple[list[tuple[int, str]], Float[Tensor, "P h w"]]:
    """Draw what the texts about each sample mean, of which there must be one; return of each mask the sample
    (its index) and the text, and the masks' logits. All texts of a picture share one packed row, and equal
    ones are drawn once."""
    distinct = [list(dict.fromkeys(own)) for own in texts]
    groups = [
        group_of(pictures, i, [referring_rollout(pictures, text) for text in own])
        for i, own in enumerate(distinct)
    ]
    packed, hidden, _ = hidden_states(pictures, groups, [])
    asked = [(i, text) for i, own in enumerate(distinct) for text in own]
    return asked, pictures.model.sam2.shown(decode_seg(pictures, packed, hidden))


@torch.no_grad()
def inverse_masks(step: RolloutStep, texts: Sequence[str]) -> list[MaskPrediction]:
    """Return the inverse model's masks for G texts per sample."""
    size = step.settings.group
    with step.timer.part("draw"), step.policies.using(step.settings.inverse):
        asked, logits = drawn(
            step, [texts[i * size : (i + 1) * size] for i in range(len(step.batch.samples))]
        )
        confidence = mean_probability(logits.sigmoid(), logits > 0)
        targets = step.batch.targets[[i for i, _ in asked]]
        overlap = soft_iou(
            F.interpolate(logits[:, None], size=targets.shape[-2:], mode="bilinear")[:, 0].sigmoid(),
            targets,
        )
        found = {
            (i, text): MaskPrediction(
                text=text, masks=((to_rle(step, z, i),),), confidence=float(sure), soft_iou=float(soft)
            )
            for (i, text), z, sure, soft in zip(asked, logits, confidence, overlap, strict=True)
        }
    return [found[i // size, text] for i, text in enumerate(texts)]


@torch.no_grad()
def draw_answers(step: RolloutStep, groups: Sequence[Group]) -> list[list[RLE]]:
    """Return the masks that the active adapter draws for the `[SEG]` tokens of each of B x G sampled
    answers, in order; also of answers that are cut off and that nothing is learned from."""
    found: list[list[RLE]] = [[] for group in groups for _ in group.rollouts]
    groups = [
        replace(g, rollouts=tuple((*asked, replace(answer, trainable=True)) for *asked, answer in g.rollouts))
        for g in groups
    ]
    with step.timer.part("draw"):
        packed, hidden, rollout = hidden_states(step, groups, [[] for _ in groups])
        drawing = rollout[packed.input_ids[packed.loss_mask] == step.model.seg_token_id].tolist()
        logits = step.model.sam2.shown(decode_seg(step, packed, hidden)) if drawing else ()
        for answer, z in zip(drawing, logits, strict=True):
            found[answer].append(to_rle(step, z, answer // step.settings.group))
    return found


def to_rle(step: EncodedBatch, logits: Float[Tensor, "h w"], index: int) -> RLE:
    chosen = step.batch.samples[index]
    return rle.encode(
        upsample(logits, size=step.model.sam2.image_size, height=chosen.height, width=chosen.width)
    )
