"""The model: images, clips and text in; text logits, `[SEG]` embeddings and mask logits out.

Built from kept libraries: transformers' own vision-language models (backbones/) and the `sam2` package's
modules (grounding.py). Nothing here draws random numbers or reads files; checkpoint.py loads and saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from sam2.modeling.sam2_utils import LayerNorm2d
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ans_core import prompts
from ans_core.data.branches import branch_places
from ans_core.data.views import Views
from ans_core.model.attention import attention_of, use_branches
from ans_core.model.backbones import BACKBONES
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.checkpointing import checkpointed
from ans_core.model.compiling import MULTIPLE, compiled
from ans_core.model.config import FrameChoice, Sa2VAConfig, VideoMode
from ans_core.model.grounding import Grounding
from ans_core.model.packing import Packed
from ans_core.precision import autocast

HALF = (torch.bfloat16, torch.float16)


class Network(nn.Module):
    """A vision-language model joined with SAM2: the hidden state of each `[SEG]` token in an answer prompts
    SAM2 for a mask."""

    def __init__(self, config: Sa2VAConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        kind = BACKBONES[config.kind]
        native: Any = kind.build(config.backbone)
        use_branches(native.model.language_model)
        self.add_module(kind.model_type, native)
        self.backbone = kind(native, config)
        self.checkpointing: int | None = 0
        """How many layers training computes again in the backward pass, of the language model and of a
        trained vision tower; None: all."""
        self.compiled = False
        """Whether `hidden_states` runs the language model's layers through torch.compile."""
        hidden = native.config.text_config.hidden_size
        self.text_hidden_fcs = nn.Sequential(
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, config.grounding.width), nn.Dropout(0.0)
        )
        self.sam2 = Grounding(config.grounding)
        self.sam2.seg_object_score = config.seg_object_score
        self.image_token_id = self._token_id(kind.marks.slot)
        self.seg_token_id = self._token_id(prompts.SEG)
        for token in (prompts.VP_START, prompts.VP_END):  # regions are found by them
            self._token_id(token)

    def _token_id(self, token: str) -> int:
        ids = self.tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"the tokenizer splits {token!r} into {len(ids)} tokens: it is a base's, or was saved "
                "before Sa2VA's tokens were added; copy the tokenizer's files (tokenizer.json, "
                "tokenizer_config.json, added_tokens.json ...) from the checkpoint that was trained"
            )
        return ids[0]

    # Upstream's names of the parts

    @property
    def language_model(self) -> nn.Module:
        """The text model, without its head."""
        model: nn.Module = self.vlm.model.language_model
        return model

    @property
    def vision_model(self) -> nn.Module:
        """The vision tower, without the projector."""
        return self.backbone.vision_tower

    @property
    def grounding_encoder(self) -> Grounding:
        """SAM2; upstream's object holds it as `sam2_model`."""
        return self.sam2

    @property
    def vlm(self) -> Any:
        """transformers' vision-language model, of any kind: it has `lm_head`, `model.language_model`,
        `generate`."""
        return self.backbone.native

    @property
    def device(self) -> torch.device:
        return self.vlm.lm_head.weight.device

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the head gives a logit (PEFT may have wrapped it)."""
        return int(self.vlm.config.text_config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of inference: half precision if any weight is stored in it, else fp32. Trained tensors
        are fp32 in any case."""
        return next((p.dtype for p in self.parameters() if p.dtype in HALF), torch.float32)

    @property
    def length_multiple(self) -> int:
        """What the lengths of rows and branches are padded to."""
        return MULTIPLE if self.compiled else 1

    def inference_autocast(self) -> torch.autocast:
        """Return the context of inference: autocast if weights are in half precision, since pixels, positions
        and trained parts are fp32."""
        return autocast(self.device, self.dtype)

    def norms_in_fp32(self) -> None:
        """Cast SAM2's layer norms to fp32, and all layer norms if some other weight is in fp32.

        On a CPU, autocast accepts half precision inputs with fp32 weights, but not fp32 inputs with half
        precision weights."""
        norms = [m for m in self.modules() if isinstance(m, (nn.LayerNorm, LayerNorm2d))]
        of_norms = {id(p) for m in norms for p in m.parameters()}
        mixed = any(p.dtype == torch.float32 for p in self.parameters() if id(p) not in of_norms)
        of_sam2 = {id(m) for m in self.sam2.modules()}
        for module in norms:
            if mixed or id(module) in of_sam2:
                module.float()

    def video_mode(self, mode: Literal[VideoMode, "auto"]) -> VideoMode:
        """Resolve `auto`: it is `sa2va-i` if the model keeps SAM2's original mask decoder, else `sa2va`.

        Raises ValueError for another mode, and where `sa2va-i` is asked for without that decoder."""
        if mode not in ("auto", *get_args(VideoMode)):
            raise ValueError(f"video mode {mode!r}; there are {', '.join(get_args(VideoMode))}, and auto")
        if mode == "auto":
            return "sa2va-i" if self.sam2.config.original_decoder else "sa2va"
        if mode == "sa2va-i" and not self.sam2.config.original_decoder:
            raise ValueError(
                "video mode sa2va-i tracks with SAM2's original mask decoder, which this model does not hold;"
                " add it (`ans convert SRC DST --sam2 sam2_hiera_large.pt`) or use video mode sa2va"
            )
        return mode

    def keep_original_decoder(self) -> None:
        """Keep a copy of SAM2's mask decoder as it is now, before Sa2VA's training, for video mode
        `sa2va-i`."""
        self.sam2.keep_original()
        self.config = replace(self.config, grounding=self.sam2.config)

    def use_seg_object_score(self) -> None:
        """Let masks of `[SEG]` be blank where the object score is negative, because SFT trains (or trained)
        it for them."""
        self.sam2.seg_object_score = True
        self.config = replace(self.config, seg_object_score=True)

    def seen_frames(
        self,
        frames: int,
        mode: VideoMode = "sa2va",
        *,
        count: int | None = None,
        choice: FrameChoice | None = None,
    ) -> list[int]:
        """Return the indices of the frames that the language model sees and that condition the masks. None =
        as the configuration says."""
        count = min(count or self.config.video_frames, frames)
        if count == 1 or (mode == "sa2va" and (choice or self.config.frame_choice) == "first"):
            return list(range(count))
        return [i * (frames - 1) // (count - 1) for i in range(count)]

    # Pictures -> tokens

    def vision_features(self, rows: Sequence[Views]) -> ImageFeatures:
        """Run the vision tower on the views of all rows in one batch, without the trained projector. It is
        frozen in SFT and RL, so compute its features once per image."""
        grids = tuple(grid for row in rows for grid in row.grids)
        with checkpointed(self.backbone.vision_tower, layers=self.checkpointing):
            return self.backbone.features(torch.cat([row.pixels for row in rows]), grids)

    def project(self, features: ImageFeatures) -> ImageFeatures:
        return self.backbone.project(features)

    def embed_text(self, input_ids: Int[Tensor, "*L"]) -> Float[Tensor, "*L E"]:
        """Embed tokens as the language model takes them: what a backbone adds to image tokens in inner layers
        is 0."""
        embeds = self.vlm.get_input_embeddings()(input_ids)
        return F.pad(embeds, (0, self.backbone.token_width - embeds.shape[-1]))

    def embed(
        self,
        input_ids: Int[Tensor, "B L"],
        images: Sequence[ImageFeatures | None],
        regions: Sequence[Sequence[Bool[Tensor, "h w"]]],
        observed: Sequence[Sequence[ImageFeatures]] = (),
        slots: Sequence[int] | None = None,
    ) -> Float[Tensor, "B L E"]:
        """Embed tokens and fill every image slot: first a row's image tokens, then cells of its regions and
        tokens of the pictures that it observes later, each in its place in the text. `images`: None for a row
        without a picture. `regions`: parts of `images`. `regions`, `observed`: of every row, in the order of
        the text; empty = none. `slots`: how many each row has, if that is known.

        Raises ValueError when slots and image tokens do not agree: a picture without `<image>`, or `<image>`
        without a picture.
        """
        embeds = self.embed_text(input_ids)
        filling = [embeds[:0].flatten(0, 1)]
        where = input_ids == self.image_token_id
        slots = where.sum(1).tolist() if slots is None else slots
        for row, (ids, image) in enumerate(zip(input_ids, images, strict=True)):
            tokens = (
                []
                if image is None
                else [image.values, *(image.region(r) for r in (regions[row] if regions else []))]
            )
            if observed and observed[row]:
                tokens = self._by_text(ids, row, tokens, [later.values for later in observed[row]])
            count = sum(map(len, tokens))
            if slots[row] != count:
                raise ValueError(
                    f"row {row}: the text has {slots[row]} image slots, the pictures and regions give "
                    f"{count} tokens"
                )
            filling += tokens
        return embeds.masked_scatter(where.unsqueeze(-1), torch.cat(filling).to(embeds.dtype))

    def _by_text(
        self, ids: Int[Tensor, " L"], row: int, picture_tokens: Sequence[Tensor], observed: Sequence[Tensor]
    ) -> list[Tensor]:
        """Sort a row's image tokens by the text. `picture_tokens`: those of its own picture, if it has one,
        then of that picture's regions."""
        first, *regions = picture_tokens or [observed[0][:0]]
        of_region = [is_region for _, is_region in self._later_runs(ids, len(first))]
        if (in_text := (of_region.count(True), of_region.count(False))) != (
            counts := (len(regions), len(observed))
        ):
            raise ValueError(
                f"row {row}: after its picture the text has {in_text[0]} regions and {in_text[1]} pictures,"
                f" given are {counts[0]} and {counts[1]}"
            )
        region, picture = iter(regions), iter(observed)
        return [first, *(next(region if is_region else picture) for is_region in of_region)]

    def _later_runs(self, ids: Int[Tensor, " L"], first: int) -> list[tuple[Int[Tensor, " n"], bool]]:
        """Return the places of every run of image slots behind a row's `first` ones, and whether it is a
        region's: it follows `<vp>`."""
        slots = (ids == self.image_token_id).nonzero()[first:, 0]
        begins = (ids[slots - 1] != self.image_token_id).nonzero()[:, 0].tolist()
        region = self.tokenizer.convert_tokens_to_ids(prompts.VP_START)
        return [(run, int(ids[run[0] - 1]) == region) for run in slots.tensor_split(begins)[1:]]

    # Tokens -> hidden states -> text and masks

    def positions(
        self,
        input_ids: Int[Tensor, "B L"],
        order: Int[Tensor, "B L"],
        images: Sequence[ImageFeatures | None],
        observed: Sequence[Sequence[ImageFeatures]] = (),
        branch: Int[Tensor, "B L"] | None = None,
    ) -> Int[Tensor, "*axes B L"]:
        """Return rotary positions. `order`: a token's number in its conversation. `observed`, `branch`: as in
        `hidden_states`; without branches a row is one conversation."""
        pictures = input_ids == self.image_token_id
        grids = [() if image is None else image.grids for image in images]
        for row, later in enumerate(observed):
            if later:
                image = images[row]
                for run, is_region in self._later_runs(
                    input_ids[row], 0 if image is None else len(image.values)
                ):
                    pictures[row, run] = not is_region
                grids[row] += tuple(grid for seen in later for grid in seen.grids)
        return self.backbone.positions(
            order, pictures, grids, torch.zeros_like(order) if branch is None else branch
        )

    def hidden_states(
        self,
        packed: Packed,
        images: Sequence[ImageFeatures | None],
        observed: Sequence[Sequence[ImageFeatures]] = (),
    ) -> Float[Tensor, "B L D"]:
        """Return the states of a packed batch that `[SEG]` and `logits` take: InternVL's and Qwen2.5-VL's
        after the last norm, Qwen3-VL's before it. `observed`: pictures in the branches of every row, in the
        order of the text; empty = none."""
        language_model = self.vlm.model.language_model
        with (
            checkpointed(language_model, layers=self.checkpointing),
            compiled(language_model, on=self.compiled),
        ):
            states, _ = self.backbone.language_model(
                self.embed(packed.input_ids, images, packed.regions, observed, packed.slots),
                position_ids=self.positions(
                    packed.input_ids, packed.position_ids, images, observed, packed.branch
                ),
                use_cache=False,
                **attention_of(
                    language_model,
                    packed.branch,
                    packed.places or branch_places(packed.branch, multiple=self.length_multiple),
                    dense=False if self.compiled else None,
                ),
            )
        return states

    def logits(self, hidden: Float[Tensor, "*L D"]) -> Float[Tensor, "*L V"]:
        """Compute text logits in fp32: bf16 logits alone put 5 % noise on a token's probability ratio."""
        return self.backbone.logits(hidden).float()

    def seg_embeddings(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
        """Project hidden states at the positions where `[SEG]` is the *input* token to prompts for SAM2."""
        return self.text_hidden_fcs(hidden)
