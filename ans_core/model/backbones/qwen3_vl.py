"""Qwen3-VL: deepstack features beside the image tokens; `[SEG]` takes the state before the last norm."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache

from ans_core.model.backbones.qwen_vl import QwenVL


class Qwen3VL(QwenVL):
    """An image token has 1 + K parts of D values: its embedding, and what is added to its hidden states after
    the first K layers."""

    model_type = "qwen3_vl"
    native_class, config_class = "Qwen3VLForConditionalGeneration", "Qwen3VLConfig"
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def merged(self, out: Any) -> Float[Tensor, "M E"]:
        return torch.cat([out.pooler_output, *out.deepstack_features], dim=-1)

    @property
    def connectors(self) -> list[nn.Module]:
        return [*super().connectors, *self.native.model.visual.deepstack_merger_list]

    @property
    def token_width(self) -> int:
        return super().token_width * (1 + len(self.native.config.vision_config.deepstack_visual_indexes))

    def language_model(
        self,
        inputs: Float[Tensor, "B L E"],
        *,
        attention_mask: Tensor,
        position_ids: Int[Tensor, "*axes B L"],
        cache: Cache | None = None,
        use_cache: bool = True,
        **attention: Any,
    ) -> tuple[Float[Tensor, "B L D"], Cache | None]:
        """The states are those before the last norm: upstream's released weights were trained with
        transformers 4.57, which gives these as `hidden_states[-1]` (transformers 5 gives the normed ones)."""
        embeds, *added = inputs.split(self.native.config.text_config.hidden_size, dim=-1)
        if added:  # tokens of an answer have none, and a GPU is not asked for them
            pictures = torch.stack([part.any(dim=-1) for part in added]).any(dim=0)  # (B, L)
            attention |= {
                "visual_pos_masks": pictures,
                "deepstack_visual_embeds": [part[pictures] for part in added],
            }
        states: list[Tensor] = []
        model = self.native.model.language_model
        handle = model.norm.register_forward_pre_hook(lambda norm, arguments: states.append(arguments[0]))
        try:
            out = model(
                inputs_embeds=embeds,
                attention_mask=attention_mask,
                position_ids=position_ids.expand(3, -1, -1),
                past_key_values=cache,
                use_cache=use_cache,
                **attention,
            )
        finally:
            handle.remove()
        return states[0], out.past_key_values

    def logits(self, states: Float[Tensor, "*L D"]) -> Float[Tensor, "*L V"]:
        return super().logits(self.native.model.language_model.norm(states))
