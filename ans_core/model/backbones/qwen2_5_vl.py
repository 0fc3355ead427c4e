"""Qwen2.5-VL: windowed vision attention; `[SEG]` takes the state after the last norm."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import vision_utils

from ans_core.data.views import Grid, Patches
from ans_core.model.backbones.qwen_vl import QwenVL


class Qwen2_5VL(QwenVL):
    model_type = "qwen2_5_vl"
    native_class, config_class = "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"
    mean = (0.48145466, 0.4578275, 0.40821073)
    std = (0.26862954, 0.26130258, 0.27577711)
    """CLIP's."""
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"

    def box_sides(self, width: int, height: int) -> tuple[int, int]:
        """Pixels of the resized picture."""
        assert isinstance(self.cutter, Patches)
        return self.cutter.size(width, height)

    def in_blocks(self, out: Any, patches: Int[Tensor, "V 3"]) -> Float[Tensor, "M m C"]:
        """Bring the blocks from the windows' order, in which the tower leaves them, to the picture's."""
        sizes = self.native.config.vision_config
        order, _ = vision_utils.get_vision_window_index(
            patches,
            spatial_merge_size=sizes.spatial_merge_size,
            window_size=sizes.window_size,
            patch_size=sizes.patch_size,
        )
        return super().in_blocks(out, patches)[order.argsort()]

    def vision_pairs(self, grid: Grid) -> int:
        """Most layers attend within windows, the last of which in a row or column may be cut off."""
        vision = self.native.config.vision_config
        # of a window, in image tokens
        side = vision.window_size // vision.patch_size // vision.spatial_merge_size
        full_layers = len(vision.fullatt_block_indexes)
        rows, columns = (
            sum(min(side, length - start) ** 2 for start in range(0, length, side)) for length in grid
        )
        windows = rows * columns * vision.spatial_merge_size**4
        full = (grid[0] * grid[1] * vision.spatial_merge_size**2) ** 2
        return int(full_layers * full + (vision.depth - full_layers) * windows)
