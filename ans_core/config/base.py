"""Settings of the stage `base`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from ans_core.config.names import StillKind
from ans_core.config.section import (
    AsTuple,
    Count,
    Impossible,
    Listed,
    Positive,
    Section,
    Weight,
    divides,
    some_weight,
)
from ans_core.config.training import Dtype, Optim


class Vision(Section):
    """Vision tower + projector. Sizes of the profile's own tiny model; published weights have their own
    config.json."""

    image_size: Positive = 96
    patch_size: Positive = 8
    hidden: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    mlp: Positive = 384

    @model_validator(mode="after")
    def _possible(self) -> Vision:
        divides(
            2 * self.patch_size,
            self.image_size,
            key="image_size",
            why="it is cut into patches, of which 2 x 2 make one image token",
        )
        divides(self.heads, self.hidden, key="hidden", why="heads share it")
        divides(4, self.hidden, key="hidden", why="sines and cosines of rows and columns fill it")
        if self.hidden > 3 * self.patch_size**2:
            raise Impossible(
                "hidden", f"{self.hidden} is more than the {3 * self.patch_size**2} values of a patch"
            )
        return self


class Language(Section):
    hidden: Positive = 160
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 2
    mlp: Positive = 448

    @model_validator(mode="after")
    def _possible(self) -> Language:
        divides(
            2 * self.heads,
            self.hidden,
            key="hidden",
            why="heads share it, each an even part, which rotary positions turn in pairs",
        )
        divides(self.kv_heads, self.heads, key="kv_heads", why="it must divide heads")
        return self


class Sam(Section):
    """SAM2. The decoder's width stays 256: its 8 heads are hard-coded, and narrower heads did not learn
    (LOG)."""

    image_size: Positive = 128
    embed: Positive = 32
    heads: Positive = 1
    stages: Annotated[tuple[Positive, Positive, Positive, Positive], AsTuple] = (1, 2, 3, 1)
    global_blocks: Listed[Count] = (4,)
    windows: Annotated[tuple[Positive, Positive, Positive, Positive], AsTuple] = (8, 4, 8, 4)
    width: Positive = 256
    memory_layers: Positive = 2
    memory_width: Positive = 64
    max_object_pointers: Positive = 16

    @model_validator(mode="after")
    def _possible(self) -> Sam:
        divides(32, self.image_size, key="image_size", why="the image encoder halves it five times")
        divides(
            4 * self.windows[0],
            self.image_size,
            key="image_size",
            why="windows[0] x windows[0] cells of 4 pixels tile the picture",
        )
        divides(self.heads, self.embed, key="embed", why="heads share it")
        divides(16, self.width, key="width", why="the mask decoder's 8 heads share half of it")
        divides(4, self.memory_width, key="memory_width", why="sines and cosines of rows and columns fill it")
        divides(
            self.memory_width,
            self.width,
            key="memory_width",
            why="object pointers of `width` are cut into such pieces",
        )
        for place, block in enumerate(self.global_blocks):
            if block >= sum(self.stages):
                raise Impossible(
                    f"global_blocks.{place}",
                    f"there is no block {block}; stages have {sum(self.stages)}, counted from 0",
                )
        return self


class Base(Section):
    """The model that SFT starts from: published weights, or a tiny one pre-trained here from random
    weights."""

    source: Literal["scratch", "published", "sam2"] = "scratch"
    """sam2: a SAM2 alone, for the stage `memory`; SFT needs a language model."""
    kind: Literal["internvl", "qwen2_5_vl", "qwen3_vl"] = "internvl"
    """scratch: the kind of vision-language model. Published weights say theirs in config.json."""
    internvl: str = ""
    """published: hub id or local folder in the hub's layout of InternVL2.5, Qwen2.5-VL or Qwen3-VL (or of a
    whole Sa2VA, a release or `runs/<profile>/model`; then `sam2` stays empty)."""
    sam2: str = ""
    """published: hub id, folder or file of SAM2 weights (sam2_hiera_large.pt)."""
    files: str = ""
    """Fingerprint of what `internvl` and `sam2` name, if that is on this machine; as prepare.sources has
    it."""
    template: Literal["qwen_chat", "internlm2_chat", "phi3_chat"] = "qwen_chat"
    vision: Vision = Vision()
    language: Language = Language()
    sam: Sam = Sam()
    vision_words: Optim = Optim(steps=800, batch=32, lr=2e-3, muon_lr=1e-2)
    """Vision tower alone: predict the words of region captions from the regions' features."""
    alignment: Optim = Optim(steps=300, batch=32, lr=3e-3, weight_decay=0.01)
    """Word embeddings and projector: move image tokens near the words for what they show."""
    sam_images: Optim = Optim(steps=500, batch=16, lr=8e-4, muon_lr=4e-3, weight_decay=0.01)
    language_text: Optim = Optim(steps=600, batch=16, lr=1e-3, muon_lr=4e-3)
    questions_per_image: Positive = 8
    mixture: dict[StillKind, Weight] = {"referring": 0.6, "region_caption": 0.3, "grounded_caption": 0.1}
    """Shares of the language side's pre-training: boxes of expressions, captions of regions and of
    pictures."""
    attention_weight: Weight = 4.0
    """Weight of supervised attention, beside the language side's text loss: attend to what a question names
    (LOG)."""
    box_weight: Weight = 4.0
    """Weight of the box head beside it: predict that thing's box."""
    click_weight: Weight = 4.0
    """Weight of the warm-up of text_hidden_fcs beside it: predict where SAM2 would have to be clicked. 0
    leaves it untrained."""
    dtype: Dtype = "auto"
    """Dtype of the forward pass (autocast); weights are fp32."""

    @model_validator(mode="after")
    def _possible(self) -> Base:
        some_weight(self.mixture.values(), key="mixture", why="nothing is asked")
        if self.source == "published" and not self.internvl:
            raise Impossible(
                "internvl", "internvl is empty: base.source is published, so name a hub id or a folder"
            )
        if self.source == "sam2" and not self.sam2:
            raise Impossible(
                "sam2", "sam2 is empty: base.source is sam2, so name a hub id, a folder or a file"
            )
        return self
