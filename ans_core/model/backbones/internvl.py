"""InternVL2.5 and 3: tiles of one size through InternViT, pixel shuffle, a trained projector, and Qwen2,
InternLM2 (a Llama) or Phi3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from jaxtyping import Float
from torch import Tensor, nn
from transformers import InternVLConfig, InternVLForConditionalGeneration

from ans_core import prompts
from ans_core.data.views import Grid, Tiling
from ans_core.model.backbones.base import Backbone, ImageFeatures, multiplied_weights

if TYPE_CHECKING:
    from ans_core.model.config import Sa2VAConfig


class InternVL(Backbone):
    model_type = "internvl"
    marks = prompts.INTERNVL_IMAGE
    parts = {
        "vision tower": "model.vision_tower.",
        "projector": "model.multi_modal_projector.",
        "embeddings": "model.language_model.embed_tokens.",
        "language model": "model.language_model.",
        "head": "lm_head.",
    }
    projectors = ("multi_modal_projector",)

    @classmethod
    def build(cls, sizes: dict[str, Any]) -> nn.Module:
        config: Any = InternVLConfig(**sizes)
        return cast(nn.Module, InternVLForConditionalGeneration(config))

    @classmethod
    def cutter_of(cls, sizes: Any, config: Sa2VAConfig) -> Tiling:
        vision = sizes.vision_config
        side, patch = (
            size[0] if isinstance(size, (list, tuple)) else size
            for size in (vision.image_size, vision.patch_size)
        )
        assert config.max_tiles is not None, (
            "an InternVL's configuration says how many tiles a picture may have"
        )
        grid = int(side // patch * sizes.downsample_ratio)
        return Tiling(size=side, max_tiles=config.max_tiles, min_tiles=config.min_tiles or 1, grid=grid)

    @property
    def vision_tower(self) -> Any:
        return self.native.model.vision_tower

    @property
    def crop_side(self) -> int:
        assert isinstance(self.cutter, Tiling)
        return self.cutter.size

    def features(self, pixels: Tensor, grids: tuple[Grid, ...]) -> ImageFeatures:
        """Run vision tower and pixel shuffle."""
        hidden = self._hidden(pixels)
        side = int(hidden.shape[1] ** 0.5)
        hidden = hidden.reshape(len(pixels), side, side, -1)
        shuffled = self.native.model.pixel_shuffle(hidden, scale_factor=self.native.config.downsample_ratio)
        return ImageFeatures(values=shuffled.flatten(0, 2), grids=grids)

    def patch_features(self, pixels: Tensor, grids: tuple[Grid, ...]) -> Float[Tensor, "P C"]:
        return self._hidden(pixels).flatten(0, 1)

    def _hidden(self, pixels: Tensor) -> Float[Tensor, "T P C"]:
        tower = self.native.model.vision_tower
        # CLS dropped
        return cast(Tensor, tower(pixel_values=pixels.to(tower.dtype)).last_hidden_state[:, 1:])

    @property
    def connectors(self) -> list[nn.Module]:
        return [self.native.model.multi_modal_projector]

    def project(self, features: ImageFeatures) -> ImageFeatures:
        return replace(features, values=self.native.model.multi_modal_projector(features.values))

    def vision_flops(self, grids: Sequence[Grid]) -> float:
        assert isinstance(self.cutter, Tiling)
        tower = self.native.model.vision_tower
        patches = (self.cutter.size // int(tower.config.patch_size[0])) ** 2
        places = patches + 1  # CLS
        scores = 4.0 * len(tower.encoder.layer) * tower.config.hidden_size * places**2
        tile = (
            2.0 * patches * multiplied_weights(tower.embeddings)
            + 2.0 * places * multiplied_weights(tower.encoder)
            + scores
        )
        return len(grids) * tile

    def projector_bytes(self, cells: int) -> int:
        """Its norm keeps what it reads and what it gives; then there are the first layer's result, its GELU
        and the second's result."""
        first = self.native.model.multi_modal_projector.linear_1
        return cells * (2 * first.in_features + 3 * first.out_features) * 4
