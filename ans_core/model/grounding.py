"""SAM2 prompted by `[SEG]` embeddings: image features and seg embeddings in, mask logits out, for images and
videos.

The modules are the `sam2` package's own. Two of its behaviours differ in this family (upstream's extension of
SAM2Base): the seg embedding is appended to the sparse prompt tokens, and masks are not blanked where the
object score is negative (unless that score was trained for `[SEG]`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from sam2.modeling.backbones.hieradet import Hiera
from sam2.modeling.backbones.image_encoder import FpnNeck, ImageEncoder
from sam2.modeling.memory_attention import MemoryAttention, MemoryAttentionLayer
from sam2.modeling.memory_encoder import CXBlock, Fuser, MaskDownSampler, MemoryEncoder
from sam2.modeling.position_encoding import PositionEmbeddingSine
from sam2.modeling.sam.transformer import RoPEAttention
from sam2.modeling.sam2_base import NO_OBJ_SCORE, SAM2Base
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GroundingConfig:
    """Sizes of a SAM2. The defaults are those of `sam2_hiera_l.yaml` (SAM 2.0), as in every published
    Sa2VA."""

    image_size: int = 1024
    embed: int = 144
    heads: int = 2
    stages: tuple[int, ...] = (2, 6, 36, 4)
    global_blocks: tuple[int, ...] = (23, 33, 43)
    windows: tuple[int, ...] = (8, 4, 16, 8)
    background: tuple[int, int] = (7, 7)
    """Size of the trunk's position table, stretched to the image."""
    width: int = 256
    top_down_levels: tuple[int, ...] = (2, 3)
    """Levels of the feature pyramid (0 = finest) that take the next coarser one in
    (`fpn_top_down_levels`)."""
    memory_layers: int = 4
    memory_feedforward: int = 2048
    memory_width: int = 64
    fuser_layers: int = 2
    """Layers of the memory encoder's fuser."""
    memory_frames: int = 7
    """Frames that the memory attention looks back at, the current one's slot included (`num_maskmem`)."""
    max_object_pointers: int = 16
    temporal_pointers: bool = False
    """SAM 2.1: object pointers carry their distance in time, and memories of frames without the object a
    learned mark."""
    original_decoder: bool = False
    """Whether SAM2's mask decoder from before Sa2VA's training is kept beside the trained one."""

    @property
    def trunk_channels(self) -> list[int]:
        """Channels of the trunk's stages, coarsest first: Hiera doubles them from stage to stage."""
        return [self.embed * 2**i for i in (3, 2, 1, 0)]

    @property
    def sam2_options(self) -> dict[str, Any]:
        """The arguments of SAM2Base beside its parts: those of the published models."""
        return {
            "num_maskmem": self.memory_frames,
            "image_size": self.image_size,
            "sigmoid_scale_for_mem_enc": 20.0,
            "sigmoid_bias_for_mem_enc": -10.0,
            "use_mask_input_as_output_without_sam": True,
            "directly_add_no_mem_embed": True,
            "use_high_res_features_in_sam": True,
            "multimask_output_in_sam": True,
            "iou_prediction_use_sigmoid": True,
            "use_obj_ptrs_in_encoder": True,
            "max_obj_ptrs_in_encoder": self.max_object_pointers,
            "add_tpos_enc_to_obj_ptrs": self.temporal_pointers,
            "proj_tpos_enc_in_obj_ptrs": self.temporal_pointers,
            "use_signed_tpos_enc_to_obj_ptrs": self.temporal_pointers,
            "no_obj_embed_spatial": self.temporal_pointers,
            "only_obj_ptrs_in_the_past_for_eval": True,
            "pred_obj_scores": True,
            "pred_obj_scores_mlp": True,
            "fixed_no_obj_ptr": True,
            "multimask_output_for_tracking": True,
            "use_multimask_token_for_obj_ptr": True,
            "multimask_min_pt_num": 0,
            "multimask_max_pt_num": 1,
            "use_mlp_for_obj_ptr_proj": True,
        }


@dataclass(frozen=True, kw_only=True)
class FrameFeatures:
    """The frozen image encoder's output for B frames, before `conv_s0`/`conv_s1` (those belong to the trained
    mask decoder)."""

    fine: Float[Tensor, "B C h4 w4"]
    middle: Float[Tensor, "B C h2 w2"]
    coarse: Float[Tensor, "B C h w"]

    def __getitem__(self, index: Any) -> FrameFeatures:
        return FrameFeatures(fine=self.fine[index], middle=self.middle[index], coarse=self.coarse[index])


@dataclass(frozen=True, kw_only=True)
class MaskOutput:
    """Output of the mask decoder for B (image, prompt) pairs. `logits` is the mask with the best predicted
    IoU of three."""

    logits: Float[Tensor, "B h4 w4"]
    all_logits: Float[Tensor, "B M h4 w4"]
    ious: Float[Tensor, "B M"]
    """Predicted IoU of every mask."""
    object_score: Float[Tensor, " B"]


Prompts = dict[int, dict[str, Any]]
"""Extra arguments of `step` by the index of the prompted frame."""

Bank = dict[str, dict[int, dict[str, Any]]]
"""SAM2's memory bank: outputs of conditioning and of other frames, by frame index."""

Correct = Callable[[dict[str, Tensor] | None, Tensor], dict[str, Tensor]]
"""(points so far, low-resolution mask logits (N, 1, h4, w4)) -> points with one more click each."""


def in_order(prompts: Prompts, frames: int) -> list[int]:
    """Return the order in which frames are processed: first the prompted ones, then the others in order of
    time."""
    return [*prompts, *(index for index in range(frames) if index not in prompts)]


def _sine(width: int) -> PositionEmbeddingSine:
    return PositionEmbeddingSine(
        num_pos_feats=width, normalize=True, scale=None, temperature=10000, warmup_cache=False
    )


class SharedPlaces(PositionEmbeddingSine):
    """For the neck: places are the same in all pictures, so all share one tensor. SAM2 copies it for each (89
    MB at 1024 pixels), and here nobody reads it: `Grounding.step` makes its own."""

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B D h w"]:
        if (size := tuple(x.shape[-2:])) not in self.cache:
            super().forward(x[:1])
        return self.cache[size].to(x).expand(len(x), -1, -1, -1)


def _rope(width: int, side: int, **kwargs: Any) -> RoPEAttention:
    return RoPEAttention(
        rope_theta=10000.0,
        feat_sizes=(side, side),
        embedding_dim=width,
        num_heads=1,
        downsample_rate=1,
        dropout=0.1,
        **kwargs,
    )


def _memory_attention(config: GroundingConfig) -> MemoryAttention:
    side = config.image_size // 16
    layer = MemoryAttentionLayer(
        activation="relu",
        dim_feedforward=config.memory_feedforward,
        dropout=0.1,
        pos_enc_at_attn=False,
        self_attention=_rope(config.width, side),
        d_model=config.width,
        pos_enc_at_cross_attn_keys=True,
        pos_enc_at_cross_attn_queries=False,
        cross_attention=_rope(config.width, side, rope_k_repeat=True, kv_in_dim=config.memory_width),
    )
    return MemoryAttention(
        d_model=config.width, pos_enc_at_input=True, layer=layer, num_layers=config.memory_layers
    )


def _memory_encoder(config: GroundingConfig) -> MemoryEncoder:
    return MemoryEncoder(
        in_dim=config.width,
        out_dim=config.memory_width,
        position_encoding=_sine(config.memory_width),
        mask_downsampler=MaskDownSampler(embed_dim=config.width, kernel_size=3, stride=2, padding=1),
        fuser=Fuser(
            CXBlock(dim=config.width, kernel_size=7, padding=3, layer_scale_init_value=1e-6, use_dwconv=True),
            num_layers=config.fuser_layers,
        ),
    )


def _image_encoder(config: GroundingConfig) -> ImageEncoder:
    trunk = Hiera(
        embed_dim=config.embed,
        num_heads=config.heads,
        stages=config.stages,
        global_att_blocks=config.global_blocks,
        window_pos_embed_bkg_spatial_size=config.background,
        window_spec=config.windows,
    )
    neck = FpnNeck(
        position_encoding=SharedPlaces(num_pos_feats=config.width, warmup_cache=False),
        d_model=config.width,
        backbone_channel_list=config.trunk_channels,
        fpn_top_down_levels=list(config.top_down_levels),
        fpn_interp_model="nearest",
    )
    return ImageEncoder(trunk=trunk, neck=neck, scalp=1)


class Grounding(SAM2Base):
    """SAM2 with upstream's two changes; parameter names are the `sam2` package's, so its checkpoints fit key
    for key."""

    sam_mask_decoder: Any

    def __init__(self, config: GroundingConfig) -> None:
        super().__init__(
            image_encoder=_image_encoder(config),
            memory_attention=_memory_attention(config),
            memory_encoder=_memory_encoder(config),
            **config.sam2_options,
        )
        self.config = config
        self.places = _sine(config.width)
        self.blank_absent = False
        """SAM2's own rule (tracked masks are -1024 where the object score is negative); upstream Sa2VA
        switched it off."""
        self.seg_object_score = False
        """The same rule for masks drawn from `[SEG]`, where the object score was trained for these
        (Sa2VAConfig.seg_object_score)."""
        if config.original_decoder:
            self.keep_original()

    def keep_original(self) -> None:
        """Keep a copy of the mask decoder as it is now, beside the one that training changes."""
        self.original_mask_decoder: nn.Module = copy.deepcopy(self.sam_mask_decoder)
        self.config = replace(self.config, original_decoder=True)

    @contextmanager
    def original(self) -> Iterator[None]:
        """Switch to SAM2 as it was before Sa2VA's training: its own mask decoder, and blank masks where the
        object is absent."""
        trained: Any = self.sam_mask_decoder
        self.sam_mask_decoder, self.blank_absent = self.original_mask_decoder, True
        try:
            yield
        finally:
            self.sam_mask_decoder, self.blank_absent = trained, False

    def encode(self, pixels: Float[Tensor, "B 3 S S"]) -> FrameFeatures:
        """Run the image encoder. There is no gradient unless its parameters require one."""
        fine, middle, coarse = self.image_encoder(pixels)["backbone_fpn"]
        return FrameFeatures(fine=fine, middle=middle, coarse=coarse)

    def blank_features(self, like: Tensor) -> FrameFeatures:
        """Features of one frame in which there is nothing, with the device and dtype of `like`."""
        side, width = self.image_size // 4, self.config.width
        fine, middle, coarse = (like.new_zeros(1, width, side // scale, side // scale) for scale in (1, 2, 4))
        return FrameFeatures(fine=fine, middle=middle, coarse=coarse)

    def high_res(self, features: FrameFeatures) -> list[Tensor]:
        """Pass the two fine maps through the mask decoder's own 1x1 convolutions. These are trained, so never
        cache the result."""
        return [self.sam_mask_decoder.conv_s0(features.fine), self.sam_mask_decoder.conv_s1(features.middle)]

    def decode(
        self,
        features: FrameFeatures,
        frame: Tensor,
        seg_embeddings: Float[Tensor, "B C"] | None = None,
        points: tuple[Tensor, Tensor] | None = None,
        *,
        multimask: bool = True,
    ) -> MaskOutput:
        """Decode masks without memory (of an image, or of a conditioning frame): prompt b reads frame
        `frame[b]` of `features`.

        points: (coordinates (B, P, 2) in pixels of the model's image, labels (B, P): 1 in, 0 out, -1 none,
        2/3 box corners).
        """
        high = [x[frame] for x in self.high_res(features)]
        pixels = features.coarse[frame] + self.no_mem_embed.view(1, -1, 1, 1)
        prompt = None if points is None else {"point_coords": points[0], "point_labels": points[1]}
        if seg_embeddings is not None:
            prompt = _seg_prompt(seg_embeddings)
        every, _, ious, low, _, _, score = self._forward_sam_heads(
            backbone_features=pixels, point_inputs=prompt, high_res_features=high, multimask_output=multimask
        )
        return MaskOutput(logits=low[:, 0], all_logits=every, ious=ious, object_score=score[:, 0])

    def shown(self, out: MaskOutput) -> Float[Tensor, "B h4 w4"]:
        """Return the mask logits of seg embeddings as they are shown: blank where a trained object score says
        that nothing is there."""
        if not self.seg_object_score:
            return out.logits
        return torch.where(out.object_score[:, None, None] > 0, out.logits, NO_OBJ_SCORE)

    def decode_every(
        self, features: FrameFeatures, frame: Tensor, points: tuple[Tensor, Tensor]
    ) -> MaskOutput:
        """Decode all four masks of images: `all_logits[:, 0]` is the single-mask output, the others are the
        three of multimask output."""
        sparse, dense = self.sam_prompt_encoder(points=points, boxes=None, masks=None)
        every, ious, _, score = self.sam_mask_decoder.predict_masks(
            image_embeddings=features.coarse[frame] + self.no_mem_embed.view(1, -1, 1, 1),
            image_pe=self.sam_prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            repeat_image=False,
            high_res_features=[x[frame] for x in self.high_res(features)],
        )
        every = every.float()
        best = every[torch.arange(len(every), device=every.device), 1 + ious[:, 1:].argmax(dim=1)]
        return MaskOutput(logits=best, all_logits=every, ious=ious, object_score=score[:, 0])

    def click_embeddings(self, at: Float[Tensor, "N 2"]) -> Float[Tensor, "N C"]:
        """Encode one click per object; `at` holds pixels (x, y) of the model's image."""
        return self.sam_prompt_encoder(
            points=(at[:, None], torch.ones(len(at), 1, device=at.device)), boxes=None, masks=None
        )[0][:, 0]

    def _forward_sam_heads(
        self,
        backbone_features,
        point_inputs=None,
        mask_inputs=None,
        high_res_features=None,
        multimask_output=False,
    ):
        """Replace SAM2Base's method: the seg embedding is the last sparse token, and masks are not blanked
        here but, on request, in `step`.

        The seven outputs are the same, but masks come at low resolution alone: only the memory needs them at
        the picture's size (4 MB a mask at 1024 pixels), and `step` makes that."""
        size, device = backbone_features.size(0), backbone_features.device
        prompt = point_inputs or {}
        coords = prompt.get("point_coords")
        if coords is None or coords.shape[1] == 0:
            coords, labels = (
                torch.zeros(size, 1, 2, device=device),
                -torch.ones(size, 1, dtype=torch.int32, device=device),
            )
        else:
            labels = prompt["point_labels"]
        if mask_inputs is not None and mask_inputs.shape[-2:] != self.sam_prompt_encoder.mask_input_size:
            mask_inputs = F.interpolate(
                mask_inputs.float(),
                size=self.sam_prompt_encoder.mask_input_size,
                mode="bilinear",
                antialias=True,
            )
        sparse, dense = self.sam_prompt_encoder(points=(coords, labels), boxes=None, masks=mask_inputs)
        if "seg_embeddings" in prompt:
            sparse = torch.cat([sparse, prompt["seg_embeddings"][:, None].to(sparse.dtype)], dim=1)
        low, ious, tokens, score = self.sam_mask_decoder(
            image_embeddings=backbone_features,
            image_pe=self.sam_prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=multimask_output,
            repeat_image=False,
            high_res_features=high_res_features,
        )
        low = low.float()
        best = ious.argmax(dim=-1) if multimask_output else torch.zeros(size, dtype=torch.long, device=device)
        rows = torch.arange(size, device=device)
        pointer = self.obj_ptr_proj(tokens[rows, best if tokens.size(1) > 1 else 0])
        gate = (score > 0).float()
        pointer = gate * pointer + (1 - gate) * self.no_obj_ptr
        return low, None, ious, low[rows, best][:, None], None, pointer, score

    def seg_prompts(self, seg_embeddings: Float[Tensor, "N C"], conditioning: Sequence[int]) -> Prompts:
        prompt = _seg_prompt(seg_embeddings)
        return {index: {"prompt": prompt} for index in conditioning}

    def mask_prompts(self, masks: Bool[Tensor, "N K H W"], conditioning: Sequence[int]) -> Prompts:
        side = (self.image_size, self.image_size)
        shown = masks.float()
        if masks.shape[-2:] != side:
            shown = (
                F.interpolate(shown, size=side, mode="bilinear", align_corners=False, antialias=True) >= 0.5
            ).float()
        return {
            index: {"masks": mask} for index, mask in zip(conditioning, shown.split(1, dim=1), strict=True)
        }

    def propagate(
        self,
        shown: Iterable[tuple[int, FrameFeatures]],
        prompts: Prompts,
        *,
        objects: int,
        frames: int,
        original: bool = False,
    ) -> Iterator[tuple[int, Float[Tensor, "N h4 w4"]]]:
        """Yield mask logits of N objects frame by frame. `shown` gives (index, features of this one frame) in
        the order of `in_order`.

        Keeps the prompted frames, and of the others no more than the memory looks back at. `frames`: of the
        whole clip. `original`: by SAM2 as it was before Sa2VA's training (`self.original`).
        """
        bank: Bank = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}
        prompted, others = bank["cond_frame_outputs"], bank["non_cond_frame_outputs"]
        readers = in_order(prompts, frames)[len(prompts) :]  # of the memory; none of them reads the last
        for index, features in shown:
            rows = torch.zeros(objects, dtype=torch.long, device=features.coarse.device)
            remember = bool(readers) and index != readers[-1]
            with self.original() if original else nullcontext():
                out = self.step(
                    self.maps(features),
                    rows,
                    index,
                    bank,
                    frames=frames,
                    remember=remember,
                    **prompts.get(index, {}),
                )
            if remember:
                # the reference stores memory features in bf16 even in fp32 runs
                out["maskmem_features"] = out["maskmem_features"].bfloat16().to(features.coarse.dtype)
                (prompted if index in prompts else others)[index] = out
            for old in [i for i in others if i < index - max(self.num_maskmem, self.max_obj_ptrs_in_encoder)]:
                del others[old]
            yield index, out["pred_masks"][:, 0]

    def maps(self, features: FrameFeatures) -> list[Tensor]:
        """Return the three feature maps for SAM2's tracking: the decoder's convolutions are applied to the
        two fine ones."""
        return [*self.high_res(features), features.coarse]

    def step(
        self,
        maps: list[Tensor],
        rows: Int[Tensor, " N"],
        index: int,
        bank: Bank,
        *,
        prompt: dict[str, Tensor] | None = None,
        masks: Float[Tensor, "N 1 S S"] | None = None,
        frames: int,
        remember: bool = True,
        correct: Correct | None = None,
        corrections: int = 0,
    ) -> dict[str, Any]:
        """Run one frame of N objects as SAM2's `track_step` does; object n reads row `rows[n]` of the maps
        (of its own clip).

        Returns SAM2's record of the frame (pred_masks, obj_ptr, memory features, all in the graph) and what
        losses need of the heads: all_logits, ious, object_score, and `outputs`: the same three of every
        correction, the first output included. These are not blanked. A prompted frame (by points, seg
        embeddings or masks) is a conditioning frame; others read the bank. `remember`: whether a later frame
        will read this one; else its memory features are None. `correct` is asked `corrections` times for more
        clicks; the mask so far goes into the next output as SAM2's mask prompt.
        """
        here = [x[rows] for x in maps]
        flat = [x.flatten(2).permute(2, 0, 1) for x in here]  # (h*w, N, C)
        sizes = [tuple(x.shape[-2:]) for x in here]
        prompted = prompt is not None or masks is not None
        places = self.places(here[-1]).flatten(2).permute(2, 0, 1)
        out, heads, high_res, fused = self._track_step(
            index, prompted, flat, [places], sizes, prompt, masks, bank, frames, False, None
        )
        outputs = [(heads[0], heads[2], heads[6][:, 0])]
        for _ in range(corrections):
            assert correct is not None, "corrections are asked for, and nothing corrects"
            prompt = correct(prompt, heads[3])
            heads = self._forward_sam_heads(
                fused, prompt, heads[3], high_res, self._use_multimask(prompted, prompt)
            )
            outputs.append((heads[0], heads[2], heads[6][:, 0]))
        every, _, ious, low, _, pointer, score = heads
        out |= {"all_logits": every, "ious": ious, "object_score": score[:, 0], "outputs": outputs}
        from_seg = prompt is not None and "seg_embeddings" in prompt
        if masks is None and (self.seg_object_score if from_seg else self.blank_absent):
            every, low = (torch.where(score[:, :, None, None] > 0, x, NO_OBJ_SCORE) for x in (every, low))
        out |= {"pred_masks": low, "obj_ptr": pointer}
        high = None
        if remember:  # a given mask, too, as it comes back from its low resolution
            # All masks and then the best, as upstream: one alone differs in the last bit, which the memory's
            # rounding to bf16 makes 2e-4.
            full_size = F.interpolate(
                every, size=(self.image_size, self.image_size), mode="bilinear", align_corners=False
            )
            high = full_size[torch.arange(len(full_size), device=full_size.device), ious.argmax(dim=1)][
                :, None
            ]
        self._encode_memory_in_output(flat, sizes, prompt, remember, high, score, out)
        return out


def _seg_prompt(seg_embeddings: Tensor) -> dict[str, Tensor]:
    size, device = len(seg_embeddings), seg_embeddings.device
    return {
        "point_coords": torch.zeros(size, 0, 2, device=device),
        "point_labels": torch.zeros(size, 0, dtype=torch.int32, device=device),
        "seg_embeddings": seg_embeddings,
    }
