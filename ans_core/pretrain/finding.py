"""Pre-training of a tiny language model to find what a question names: text loss plus losses of attention,
boxes and clicks.

It replaces what a published InternVL knows. From random weights, next-token prediction alone teaches it late:
after thousands of questions the model tells the colour of a shown region, but does not find "the red circle"
(LOG). Supervised attention follows Mi et al. (2016, for translation); the box head regresses the box that the
answer will name, as detectors do. `text_hidden_fcs`, which `[SEG]` will use, is warmed up: it learns to say
where SAM2 should be clicked, as projectors are warmed up before fine-tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from ans_core.data.collate import Batch
from ans_core.dist import Metrics
from ans_core.model.network import Network
from ans_core.model.packing import branch_attention
from ans_core.model.supervised import Supervised


class Finding(Supervised):
    """Text loss + attention_weight * KL(the thing's cells || attention) + box_weight * L1 of the thing's box
    + click_weight * MSE of the prompt encoder's embedding of a click on its middle.

    If nothing fits, the attention shall stay on the text, as on a null word of translation's alignments;
    there is no box and no click then.

    The attention is that of the first half of the heads of the middle layer: the layers below gather the
    question's words, the layers above read what was found. `Batch.looks` lists the tokens with a target;
    every thing weighs the same. Box (by a linear head that is discarded) and click are read from the last
    hidden states of a thing's first two (one, in a caption), each of which weighs the same.
    """

    def __init__(
        self, model: Network, *, attention_weight: float, box_weight: float, click_weight: float
    ) -> None:
        super().__init__(model, mask_weight=0.0, dice_weight=0.0, points=1)
        self.attention_weight, self.box_weight, self.click_weight = attention_weight, box_weight, click_weight
        self.box_head = nn.Linear(model.vlm.config.text_config.hidden_size, 4)
        self._attention = middle_attention(model)

    def begin_step(self, batches: Sequence[Batch]) -> list[Batch]:
        counted = super().begin_step(batches)
        things = float(sum(len(batch.things) for batch in batches))
        early = float(sum(int(early_looks(batch).sum()) for batch in batches))
        return [
            replace(batch, totals={**batch.totals, "things": things, "early": early}) for batch in counted
        ]

    def forward(self, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        seen: dict[str, Any] = {}
        hook = self._attention.register_forward_pre_hook(
            lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
        )
        try:
            loss, metrics = super().forward(batch)
        finally:
            hook.remove()
        if not len(batch.looks):
            return loss, metrics
        rows, places, thing = batch.looks.unbind(1)
        attended, target = (
            self.attended(seen["hidden_states"], seen["position_embeddings"], batch),
            batch.things[thing][:, None],
        )
        weights, there = look_weights(thing), is_there(batch)[thing]
        on_picture = attended.exp().sum(2).clamp(max=1 - 1e-6)  # (K, heads)
        astray = torch.where(
            there[:, None],
            (torch.xlogy(target, target) - target * attended).sum(2),
            -torch.log1p(-on_picture),
        )
        divergence = (weights * astray.mean(1)).sum()
        metrics |= {"attention": divergence.detach()}
        if not there.all():
            metrics["attention_if_absent"] = on_picture.detach()[~there].mean()
        loss = loss + self.attention_weight * divergence * len(batch.things) / batch.totals.get(
            "things", len(batch.things)
        )
        if not there.any():
            return loss, metrics
        on_target = (attended.detach().exp() * (target > 0)).sum(2).mean(1)
        metrics["attention_on_target"] = (weights * on_target).sum() / weights[there].sum()
        early = early_looks(batch)
        hidden, box = self._last[rows[early], places[early]], batch.boxes[thing[early]]
        off = (self.box_head(hidden).float() - box).abs().mean()
        middle = (box[:, :2] + box[:, 2:]) / 2 * self.model.sam2.image_size
        missed = F.mse_loss(
            self.model.seg_embeddings(hidden).float(), self.model.sam2.click_embeddings(middle)
        )
        metrics |= {"box": off.detach(), "click": missed.detach()}
        share = float(early.sum()) / batch.totals.get("early", float(early.sum()))
        return loss + share * (self.box_weight * off + self.click_weight * missed), metrics

    def states(self, batch: Batch) -> Float[Tensor, "B L D"]:
        self._last = super().states(batch)
        return self._last

    def attended(
        self, hidden: Float[Tensor, "B L D"], rotary: tuple[Tensor, Tensor], batch: Batch
    ) -> Float[Tensor, "K heads cells"]:
        """Return the log-probability of attention from every look to every cell of its row's image; the rest
        of the attention goes to text.

        hidden: input of the layer's attention; rotary: its cosines and sines.
        """
        attention, (rows, places, _) = self._attention, batch.looks.unbind(1)
        query, key = (
            f(hidden).unflatten(-1, (-1, attention.head_dim)) for f in (attention.q_proj, attention.k_proj)
        )
        if hasattr(attention, "q_norm"):  # Qwen3
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        heads = query.shape[1] // 2
        query, key = query[:, :heads], key.repeat_interleave(attention.num_key_value_groups, dim=1)[:, :heads]
        scores = (query @ key.transpose(2, 3) * attention.scaling)[rows, :, places].float()  # (K, heads, L)
        allowed = branch_attention(batch.branch)[rows, places]
        attended = scores.masked_fill(~allowed[:, None], -torch.inf).log_softmax(-1)
        image = (batch.input_ids == self.model.image_token_id) & (batch.branch == 0)
        cells = image[rows].nonzero()[:, 1].view(len(rows), -1)[:, -batch.things.shape[1] :]
        return attended.gather(2, cells[:, None].expand(-1, heads, -1))


def is_there(batch: Batch) -> Bool[Tensor, " O"]:
    """Tell which of the batch's things are in their picture."""
    return batch.things.sum(1) > 0


def early_looks(batch: Batch) -> Bool[Tensor, " K"]:
    """Tell which looks box and click are read from: the first two at each thing that is there."""
    thing = batch.looks[:, 2]
    return first_looks(thing) & is_there(batch)[thing]


def look_weights(thing: Tensor) -> Float[Tensor, " K"]:
    """Return weights of looks in order (`Batch.looks[:, 2]`): all things weigh the same, and looks at one
    thing share its weight; adds up to 1."""
    looks = thing.bincount()
    return 1.0 / (len(looks) * looks[thing])


def first_looks(thing: Tensor) -> Bool[Tensor, " K"]:
    """Tell which of the looks, in order, are among the first two at their thing."""
    return torch.cat([torch.ones_like(thing[:2], dtype=torch.bool), thing[2:] != thing[:-2]])


def middle_attention(model: Network) -> Any:
    """Return the attention layer of a tiny language model that `Finding` supervises."""
    layers = model.vlm.model.language_model.layers
    return layers[len(layers) // 2].self_attn
