"""What Qwen2.5-VL and Qwen3-VL share: pictures at their own size, a frozen merger, and rotary positions in
three rows (mrope)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache

from ans_core import prompts
from ans_core.data.views import Grid, Patches, Preparation
from ans_core.model.backbones.base import Backbone, ImageFeatures, PromptForm, multiplied_weights

if TYPE_CHECKING:
    from ans_core.model.config import Sa2VAConfig

Colour = tuple[float, float, float]
MIN_PIXELS, MAX_PIXELS = 512 * 28 * 28, 2048 * 28 * 28
"""Upstream's limits of an image, for both generations."""


def needed(name: str) -> Any:
    """Return a class of transformers; raises ValueError where the installed version is too old to have it."""
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ValueError(
            f"transformers {transformers.__version__} has no {name}; install that of constraints.txt:"
            " pip install -c constraints.txt transformers"
        )
    return model_class


class QwenVL(Backbone):
    """Subclasses name transformers' classes: one installed version may have the one generation only."""

    native_class: ClassVar[str]
    config_class: ClassVar[str]
    marks = prompts.QWEN_IMAGE
    parts = {
        "vision tower": "model.visual.",
        "embeddings": "model.language_model.embed_tokens.",
        "language model": "model.language_model.",
        "head": "lm_head.",
    }
    mean: ClassVar[Colour]
    std: ClassVar[Colour]
    system: ClassVar[str] = ""
    """Text before the first turn, in upstream's inference alone."""

    @classmethod
    def build(cls, sizes: dict[str, Any]) -> nn.Module:
        return cast(nn.Module, needed(cls.native_class)(needed(cls.config_class)(**sizes)))

    @classmethod
    def cutter_of(cls, sizes: Any, config: Sa2VAConfig) -> Patches:
        vision = sizes.vision_config
        return Patches(
            patch=vision.patch_size,
            merge=vision.spatial_merge_size,
            temporal=vision.temporal_patch_size,
            mean=cls.mean,
            std=cls.std,
            min_pixels=config.min_pixels or MIN_PIXELS,
            max_pixels=config.max_pixels or MAX_PIXELS,
        )

    @property
    def vision_tower(self) -> Any:
        return self.native.model.visual

    @property
    def crop_side(self) -> int:
        assert isinstance(self.cutter, Patches)
        return int(self.cutter.min_pixels**0.5)

    def features(self, pixels: Tensor, grids: tuple[Grid, ...]) -> ImageFeatures:
        """Run vision tower and merger, which is frozen."""
        return ImageFeatures(
            values=self.merged(self.vision_tower(pixels, grid_thw=self._patches(pixels, grids))), grids=grids
        )

    def patch_features(self, pixels: Tensor, grids: tuple[Grid, ...]) -> Float[Tensor, "P C"]:
        patches = self._patches(pixels, grids)
        merge = self.native.config.vision_config.spatial_merge_size
        parts = self.in_blocks(self.vision_tower(pixels, grid_thw=patches), patches).split(
            [rows * columns for rows, columns in grids]
        )
        blocks = [
            part.unflatten(1, (merge, merge)).unflatten(0, grid)
            for part, grid in zip(parts, grids, strict=True)
        ]
        return torch.cat([block.transpose(1, 2).flatten(0, 3) for block in blocks])

    def in_blocks(self, out: Any, patches: Int[Tensor, "V 3"]) -> Float[Tensor, "M m C"]:
        """Return the last features of the m patches of every block that becomes an image token, row by
        row."""
        return cast(Tensor, out.last_hidden_state).unflatten(
            0, (-1, self.native.config.vision_config.spatial_merge_size**2)
        )

    def _patches(self, pixels: Tensor, grids: tuple[Grid, ...]) -> Int[Tensor, "V 3"]:
        """Return the patches of every view: (1, rows, columns)."""
        merge = self.native.config.vision_config.spatial_merge_size
        return torch.tensor(
            [(1, rows * merge, columns * merge) for rows, columns in grids], device=pixels.device
        )

    @property
    def connectors(self) -> list[nn.Module]:
        return [self.native.model.visual.merger]

    def vision_flops(self, grids: Sequence[Grid]) -> float:
        """The frozen mergers included, which read four patches as one place."""
        tower, merge = self.vision_tower, self.native.config.vision_config.spatial_merge_size
        tokens = sum(rows * columns for rows, columns in grids)
        of_patch = multiplied_weights(tower.patch_embed) + multiplied_weights(tower.blocks)
        of_token = sum(map(multiplied_weights, self.connectors))
        scores = 4.0 * self.native.config.vision_config.hidden_size * sum(map(self.vision_pairs, grids))
        return 2.0 * tokens * (merge**2 * of_patch + of_token) + scores

    def vision_pairs(self, grid: Grid) -> int:
        """Return how many pairs of a view's patches attend to each other, over all layers of the vision
        tower."""
        vision = self.native.config.vision_config
        return int(vision.depth * (grid[0] * grid[1] * vision.spatial_merge_size**2) ** 2)

    def merged(self, out: Any) -> Float[Tensor, "M E"]:
        """Return the image tokens of the vision tower's output."""
        return cast(Tensor, out.pooler_output)

    def positions(
        self,
        order: Int[Tensor, "B L"],
        slots: Bool[Tensor, "B L"],
        grids: Sequence[tuple[Grid, ...]],
        branch: Int[Tensor, "B L"],
    ) -> Int[Tensor, "3 B L"]:
        """Text counts in all three rows. A picture's cells lie at (start, start + row, start + column), and
        what follows in its branch goes on after the largest of these. Cells of regions, which stand in a
        question, count as text."""
        positions = order.expand(3, -1, -1).clone()
        for row, (counted, marked, row_grids) in enumerate(zip(order, slots, grids, strict=True)):
            places, done = marked.nonzero()[:, 0], 0
            for height, width in row_grids:
                cells, done = places[done : done + height * width], done + height * width
                start = positions[0, row, cells[0]].clone()
                lines = torch.arange(height, device=order.device).repeat_interleave(width)
                columns = torch.arange(width, device=order.device).repeat(height)
                of = branch[row, cells[0]]
                after = (counted > counted[cells[-1]]) & ((branch[row] == of) | (of == 0))
                positions[:, row, after] += max(height, width) - height * width
                positions[:, row, cells] = start + torch.stack([torch.zeros_like(lines), lines, columns])
        return positions

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
        three = position_ids.expand(3, -1, -1)
        return super().language_model(
            inputs,
            attention_mask=attention_mask,
            position_ids=three,
            cache=cache,
            use_cache=use_cache,
            **attention,
        )

    def prompt_form(self, preparation: Preparation) -> PromptForm:
        if preparation == "training":
            return PromptForm()
        return PromptForm(before=self.system, between_frames="", prompt_segs=True, pictures_first=True)
