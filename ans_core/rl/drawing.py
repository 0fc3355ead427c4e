"""Masks of a step's pictures: hidden states, embeddings, clicks or texts in, logits and masks out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

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


def decode_seg(
    step: EncodedBatch, packed: Packed, hidden: Float[Tensor, "B L D"]
) -> tuple[Float[Tensor, "P C"], MaskOutput]:
    """Return the embeddings of every row's `[SEG]` tokens and the masks they decode to."""
    at = (packed.input_ids == step.model.seg_token_id) & packed.loss_mask
    embeddings = step.model.seg_embeddings(hidden[at])
    return embeddings, step.model.sam2.decode(step.frames, at.nonzero()[:, 0], embeddings)


def first_masks(
    step: RolloutStep, packed: Packed, hidden: Float[Tensor, "B L D"], rollout: Int[Tensor, " M"]
) -> tuple[Int[Tensor, " P"], Float[Tensor, "P h w"], Bool[Tensor, " P"]]:
    """Return the answers that say `[SEG]`, the logits of the first one's mask in each, and whether it is
    shown. What makes masks of hidden states is a constant here: gradients reach the language model
    alone."""
    drawing = rollout[packed.input_ids[packed.loss_mask] == step.model.seg_token_id]
    first = torch.ones_like(drawing, dtype=torch.bool)
    first[1:] = drawing[1:] != drawing[:-1]
    with constant(step.model.text_hidden_fcs, step.model.sam2.sam_mask_decoder):
        if len(drawing):
            out = decode_seg(step, packed, hidden)[1]
        else:  # SAM2 can't decode nothing
            embeddings = step.model.seg_embeddings(hidden[0, :1])
            out = step.model.sam2.decode(
                step.model.sam2.blank_features(hidden), drawing.new_zeros(1), embeddings
            )
    kept = first if len(drawing) else first.new_zeros(1)
    shown = step.model.sam2.shown(out).flatten(1).amax(1) > 0
    return drawing[first], out.logits[kept], shown[kept]


def decode_embeddings(
    step: RolloutStep, embeddings: Float[Tensor, "P C"], samples: Int[Tensor, " P"]
) -> Float[Tensor, "P h w"]:
    """Decode embeddings in the pictures of these samples (their indices) to mask logits."""
    return step.model.sam2.decode(step.frames, samples, embeddings).logits


def click_embeddings(step: RolloutStep, at: Float[Tensor, "P 2"]) -> Float[Tensor, "P C"]:
    """Return the prompt embeddings of clicks at (x, y), shares of the picture."""
    return step.model.sam2.click_embeddings(at.to(step.model.device) * step.model.sam2.image_size)


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
    return asked, pictures.model.sam2.shown(decode_seg(pictures, packed, hidden)[1])


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
        logits = step.model.sam2.shown(decode_seg(step, packed, hidden)[1]) if drawing else ()
        for answer, z in zip(drawing, logits, strict=True):
            found[answer].append(to_rle(step, z, answer // step.settings.group))
    return found


def to_rle(step: EncodedBatch, logits: Float[Tensor, "h w"], index: int) -> RLE:
    chosen = step.batch.samples[index]
    return rle.encode(
        upsample(logits, size=step.model.sam2.image_size, height=chosen.height, width=chosen.width)
    )


@contextmanager
def constant(*modules: nn.Module) -> Iterator[None]:
    """Let what is computed here have no gradient with respect to the modules' parameters."""
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)
