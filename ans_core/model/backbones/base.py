"""What a Sa2VA asks of the vision-language model it is built on: pictures to image tokens, tokens to hidden
states.

A `Backbone` holds transformers' own model of one kind and everything in which that kind differs from others.
The model's tensors belong to the Sa2VA, under the backbone's `model_type`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache

from ans_core import prompts
from ans_core.data.views import Cutter, Grid, Preparation, Views, shown_view

if TYPE_CHECKING:
    from ans_core.model.config import Sa2VAConfig


@dataclass(frozen=True, kw_only=True)
class ImageFeatures:
    """What the frozen vision tower makes of V views, or the image tokens that the projector makes of that: M
    cells in a row."""

    values: Float[Tensor, "M C"]
    grids: tuple[Grid, ...]
    pictures: tuple[int, ...] = ()
    """As in `Views`."""

    @staticmethod
    def joined(images: Sequence[ImageFeatures]) -> ImageFeatures:
        """Join the features of a row's pictures, at least one, in the order of its text."""
        return ImageFeatures(
            values=torch.cat([image.values for image in images]),
            grids=tuple(grid for image in images for grid in image.grids),
            pictures=tuple(views for image in images for views in image.pictures or (len(image.grids),)),
        )

    def split(self, rows: Sequence[Views]) -> list[ImageFeatures]:
        """Split features of the views of several rows into one per row."""
        cells = [sum(height * width for height, width in row.grids) for row in rows]
        parts = self.values.split(cells)
        return [
            ImageFeatures(values=part, grids=row.grids, pictures=row.pictures)
            for part, row in zip(parts, rows, strict=True)
        ]

    def region(self, mask: Bool[Tensor, "h w"]) -> Float[Tensor, "_ C"]:
        """Return the marked cells of the view that shows the whole image (the first of several), or a clip's
        first frame. A mask on the CPU stays there."""
        cells = [height * width for height, width in self.grids]
        marked = mask.flatten().nonzero()[:, 0].to(self.values.device, non_blocking=True)
        return self.values.split(cells)[shown_view(self.pictures)][marked]


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """The text before the first turn, the text between a clip's frames, whether `[SEG]` in a question draws a
    mask, and whether pictures come first in their turn wherever `<image>` is, or without any."""

    before: str = ""
    between_frames: str = "\n"
    prompt_segs: bool = False
    pictures_first: bool = False


def multiplied_weights(module: nn.Module) -> int:
    """Return the number of weights that every place of an input is multiplied with."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, kinds))


class Backbone(ABC):
    """One kind of vision-language model in transformers' classes: `native` has `lm_head`,
    `model.language_model`."""

    model_type: ClassVar[str]
    """transformers' name of the kind; also the name of `native` in a Sa2VA, with which its tensors' names
    begin."""
    marks: ClassVar[prompts.ImageMarks]
    parts: ClassVar[dict[str, str]]
    """Part -> prefix of its parameters' names inside `native`."""
    projectors: ClassVar[tuple[str, ...]] = ()
    """Names in `native.model` of the modules between vision tower and language model that SFT and RL train
    whole."""

    def __init__(self, native: Any, config: Sa2VAConfig) -> None:
        self.native = native
        self.cutter = self.cutter_of(native.config, config)

    @classmethod
    @abstractmethod
    def build(cls, sizes: dict[str, Any]) -> nn.Module:
        """Build transformers' model of these sizes (its configuration as a dict)."""

    @classmethod
    @abstractmethod
    def cutter_of(cls, sizes: Any, config: Sa2VAConfig) -> Cutter:
        """Return how this kind's pictures are cut. `sizes`: transformers' configuration."""

    def box_sides(self, width: int, height: int) -> tuple[int, int]:
        """Return the sides of a picture of this size in the unit of the boxes that a published base gives:
        thousandths."""
        return 1000, 1000

    # Pictures -> image tokens

    @property
    @abstractmethod
    def vision_tower(self) -> Any:
        """Return transformers' module of it."""

    @property
    @abstractmethod
    def crop_side(self) -> int:
        """Side in pixels that a picture is enlarged to before the model sees it, if it is smaller."""

    @abstractmethod
    def features(self, pixels: Tensor, grids: tuple[Grid, ...]) -> ImageFeatures:
        """Run the vision tower on the pixels of some views."""

    @abstractmethod
    def patch_features(self, pixels: Tensor, grids: tuple[Grid, ...]) -> Float[Tensor, "P C"]:
        """Return the vision tower's last features of every patch, of 2 x 2 per image token: row by row, view
        after view."""

    @property
    @abstractmethod
    def connectors(self) -> list[nn.Module]:
        """The modules between vision tower and language model, which pre-training from random weights trains
        with the latter."""

    def project(self, features: ImageFeatures) -> ImageFeatures:
        """Run the trained projector; a kind without one returns the features."""
        return features

    @abstractmethod
    def vision_flops(self, grids: Sequence[Grid]) -> float:
        """Count the floating point operations of `features` for views with these grids, by formula."""

    def projector_bytes(self, cells: int) -> int:
        """Return what the trained projector keeps of so many image tokens for the backward pass, in fp32."""
        return 0

    @property
    def token_width(self) -> int:
        """Number of values per token that the language model takes: its embedding, then what this kind adds
        to inner layers."""
        return int(self.native.config.text_config.hidden_size)

    # Tokens -> hidden states

    def positions(
        self,
        order: Int[Tensor, "B L"],
        slots: Bool[Tensor, "B L"],
        grids: Sequence[tuple[Grid, ...]],
        branch: Int[Tensor, "B L"],
    ) -> Int[Tensor, "*axes B L"]:
        """Return rotary positions. `order`: a token's number in its conversation. `slots`: image tokens, of
        which a row's first ones are the cells of its `grids`. `branch`: of a token in its row; 0 is what all
        branches share."""
        return order

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
        """Read tokens and return their states, which `[SEG]` and `logits` take, with the cache that now holds
        them. `attention`: further arguments of `model.attention.attend`, the same for all layers."""
        out = self.native.model.language_model(
            inputs_embeds=inputs,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=use_cache,
            **attention,
        )
        return out.last_hidden_state, out.past_key_values

    def logits(self, states: Float[Tensor, "*L D"]) -> Float[Tensor, "*L V"]:
        return self.native.lm_head(states)

    # Upstream's inference (`preparation="upstream"`), where it differs from its training

    def prompt_form(self, preparation: Preparation) -> PromptForm:
        """Return how the prompt is written around turns and pictures."""
        return PromptForm()
