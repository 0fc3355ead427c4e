"""SAM2 files of any origin <-> Grounding: the published .pt, transformers' Sam2VideoModel, a Sa2VA folder,
our own folder of a SAM2 alone.

Our folder holds `sam2.pt` and `sam2.yaml`, from which the stock `sam2` package builds its video predictor,
and config.json with the sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor
from transformers import Sam2VideoConfig

from ans_core.checkpoints import bases, checkpoint, layouts
from ans_core.checkpoints import folder as folders
from ans_core.model.grounding import Grounding, GroundingConfig
from ans_core.written import atomic_folder

OUR_TYPE = "ans_sam2"
WEIGHTS, STOCK = "sam2.pt", "sam2.yaml"
PART = "sam2."
"""Prefix of SAM2's tensors in a Sa2VA."""
DECODER, ORIGINAL = "sam_mask_decoder.", "original_mask_decoder."
"""Prefixes of the mask decoder in a SAM2, after and before Sa2VA's training."""

PUBLISHED: dict[tuple[int, int], dict[str, Any]] = {
    (96, 12): {"stages": (1, 2, 7, 2), "heads": 1, "global_blocks": (5, 7, 9), "windows": (8, 4, 14, 7)},
    (96, 16): {"stages": (1, 2, 11, 2), "heads": 1, "global_blocks": (7, 10, 13), "windows": (8, 4, 14, 7)},
    (112, 24): {"stages": (2, 3, 16, 3), "heads": 2, "global_blocks": (12, 16, 20), "windows": (8, 4, 14, 7)},
    (144, 48): {"stages": (2, 6, 36, 4), "heads": 2, "global_blocks": (23, 33, 43), "windows": (8, 4, 16, 8)},
}
"""(width of the trunk's first stage, number of its blocks) of sam2_hiera_t, s, b+ and l -> sizes that the
weights' shapes don't tell."""


def identity(source: str | Path) -> tuple[str, str]:
    """Return a name of what `load` reads, and the hash of its tensors."""
    path = Path(source)
    if _kind(path) in (checkpoint.OUR_TYPE, checkpoint.RELEASE_TYPE):
        return path.name, checkpoint.weights_hash(path)
    file = path / WEIGHTS if _kind(path) == OUR_TYPE else bases.sam2_file(source)
    return (path.name if path.is_dir() else file.stem), folders.file_hash(file)


def load(source: str | Path, *, image_size: int = 0, device: torch.device | str = "cpu") -> Grounding:
    """Load a SAM2 in fp32 and eval mode from our folder, a Sa2VA folder (ours or a release), a published file
    (.pt), a folder with one, or a hub id. Of a Sa2VA it has the mask decoder from before its training, if
    that is kept. `image_size` 0 keeps the checkpoint's; no weight depends on it.

    Raises ValueError for what is none of these, and names tensors that don't fit.
    """
    path = Path(source)
    kind = _kind(path)
    if kind in (checkpoint.OUR_TYPE, checkpoint.RELEASE_TYPE):
        config, tensors = of_sa2va(path)
        config = replace(config, original_decoder=False, image_size=image_size or config.image_size)
        return _built(config, stock_names(tensors).items(), where=str(source), device=device)
    if kind == OUR_TYPE:
        folders.verify(path)
        with folders.reading(path / "config.json"):
            sizes = json.loads((path / "config.json").read_text(encoding="utf-8"))["sizes"]
            values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in sizes.items()}
            config = GroundingConfig(**values)
        tensors = dict(bases.sam2_tensors(path / WEIGHTS))
    else:
        file = bases.sam2_file(source)
        tensors = dict(bases.sam2_tensors(file))
        theirs = any(name.startswith("vision_encoder.") for name in tensors)
        if theirs:
            tensors = from_transformers(tensors)
        sizes_file = file.with_name("tiny_sam2_config.json")  # beside small test weights
        if theirs and _kind(file.parent) == TRANSFORMERS_TYPE:
            config = read_transformers_config(file.with_name("config.json"))
        else:
            config = (
                layouts.grounding_config(json.loads(sizes_file.read_text(encoding="utf-8")))
                if sizes_file.exists()
                else sizes_of(tensors, where=str(file))
            )
    config = replace(config, image_size=image_size or config.image_size)
    return _built(config, tensors.items(), where=str(source), device=device)


def of_sa2va(path: Path) -> tuple[GroundingConfig, dict[str, Tensor]]:
    """Read sizes and tensors of SAM2, in their own dtype, of a Sa2VA folder (ours or a release). No other
    tensor is held."""
    config, _, state = checkpoint.opened(path)
    return config.grounding, {
        name.removeprefix(PART): tensor.clone() for name, tensor in state if name.startswith(PART)
    }


def keeps_no_original(path: Path) -> bool:
    """Say whether a Sa2VA holds one mask decoder alone."""
    return (
        _kind(path) in (checkpoint.OUR_TYPE, checkpoint.RELEASE_TYPE)
        and not checkpoint.opened(path)[0].grounding.original_decoder
    )


def _kind(path: Path) -> str | None:
    file = path / "config.json"
    if not file.is_file():
        return None
    with folders.reading(file):
        return json.loads(file.read_text(encoding="utf-8")).get("model_type")


def _built(
    config: GroundingConfig, tensors: Iterable[tuple[str, Tensor]], *, where: str, device: torch.device | str
) -> Grounding:
    with init_empty_weights(include_buffers=False):
        sam2 = Grounding(config)
    checkpoint.fill(sam2, tensors, where=where, dtype=torch.float32, device=device)
    return sam2.eval()


def sizes_of(tensors: dict[str, Tensor], *, where: str) -> GroundingConfig:
    """Tell the sizes of a published SAM2 by its tensors. Raises ValueError for a trunk of another size than
    the four published ones."""
    if "image_encoder.trunk.patch_embed.proj.weight" not in tensors:
        raise ValueError(
            f"{where} holds no SAM2: there is no tensor image_encoder.trunk.patch_embed.proj.weight"
        )
    embed = tensors["image_encoder.trunk.patch_embed.proj.weight"].shape[0]
    blocks = 1 + max(
        int(match[1])
        for name in tensors
        if (match := re.match(r"image_encoder\.trunk\.blocks\.(\d+)\.", name))
    )
    if (embed, blocks) not in PUBLISHED:
        published_sizes = ", ".join(f"{width} x {count}" for width, count in PUBLISHED)
        raise ValueError(
            f"{where}: an image encoder of width {embed} with {blocks} blocks is none of SAM2's ({published_sizes})"
        )
    rows, columns = tensors["image_encoder.trunk.pos_embed"].shape[-2:]
    return GroundingConfig(
        embed=embed,
        background=(rows, columns),
        temporal_pointers="no_obj_embed_spatial" in tensors,
        **PUBLISHED[embed, blocks],
    )


def save(sam2: Grounding, path: Path, *, metadata: dict[str, Any]) -> None:
    """Write our folder, whole or not at all. The mask decoder is the original one, if that was kept beside
    one trained for `[SEG]`."""
    state = stock_state(sam2)
    config = replace(sam2.config, original_decoder=False)
    with atomic_folder(path, size=sum(t.numel() * t.element_size() for t in state.values())) as partial:
        torch.save({"model": state}, partial / WEIGHTS)
        (partial / STOCK).write_text(yaml.safe_dump({"model": stock_config(config)}, sort_keys=False))
        (partial / "config.json").write_text(
            json.dumps({"model_type": OUR_TYPE, "sizes": asdict(config)}, indent=1) + "\n"
        )
        folders.write_manifest(partial, metadata)


def stock_state(sam2: Grounding) -> dict[str, Tensor]:
    """Return the tensors by the stock package's names."""
    return stock_names({name: tensor.detach().cpu() for name, tensor in sam2.state_dict().items()})


def stock_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as the stock package does: of two mask decoders the original one counts."""
    original = {
        name.replace(ORIGINAL, DECODER): tensor for name, tensor in state.items() if name.startswith(ORIGINAL)
    }
    return {name: tensor for name, tensor in state.items() if not name.startswith(ORIGINAL)} | original


def stock_config(config: GroundingConfig) -> dict[str, Any]:
    """Return what Hydra instantiates as the stock video predictor of these sizes, without its optional
    post-processing: the package's own file of hiera-large, with other sizes."""
    file = resources.files("sam2").joinpath("configs/sam2/sam2_hiera_l.yaml")
    model: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")).model)
    side = config.image_size // 16
    encoder, attention, memory = (
        model[part] for part in ("image_encoder", "memory_attention", "memory_encoder")
    )
    encoder["trunk"] |= {
        "embed_dim": config.embed, "num_heads": config.heads, "stages": list(config.stages),
        "global_att_blocks": list(config.global_blocks), "window_spec": list(config.windows),
        "window_pos_embed_bkg_spatial_size": list(config.background),
    }  # fmt: skip
    encoder["neck"] |= {
        "d_model": config.width, "backbone_channel_list": config.trunk_channels,
        "fpn_top_down_levels": list(config.top_down_levels),
    }  # fmt: skip
    encoder["neck"]["position_encoding"]["num_pos_feats"] = config.width
    attention |= {"d_model": config.width, "num_layers": config.memory_layers}
    attention["layer"] |= {"d_model": config.width, "dim_feedforward": config.memory_feedforward}
    for kind in ("self_attention", "cross_attention"):
        attention["layer"][kind] |= {"embedding_dim": config.width, "feat_sizes": [side, side]}
    attention["layer"]["cross_attention"]["kv_in_dim"] = config.memory_width
    memory |= {"in_dim": config.width, "out_dim": config.memory_width}
    memory["position_encoding"]["num_pos_feats"] = config.memory_width
    memory["mask_downsampler"]["embed_dim"] = config.width
    memory["fuser"]["num_layers"] = config.fuser_layers
    memory["fuser"]["layer"]["dim"] = config.width
    return model | {"_target_": "sam2.sam2_video_predictor.SAM2VideoPredictor", **config.sam2_options}


# transformers' names: Sam2VideoModel

TRANSFORMERS_TYPE = "sam2_video"
TRANSFORMERS_WIDTH = 64
"""Width of its memories, which its configuration can't change; that of every published SAM2."""
_MLP3 = ("iou_prediction_head", r"output_hypernetworks_mlps\.\d+", "pred_obj_score_head", "obj_ptr_proj")
_RULES: tuple[tuple[str, str], ...] = (
    *((rf"({mlp})\.layers\.0\.", r"\1.proj_in.") for mlp in _MLP3),
    *((rf"({mlp})\.layers\.1\.", r"\1.layers.0.") for mlp in _MLP3),
    *((rf"({mlp})\.layers\.2\.", r"\1.proj_out.") for mlp in _MLP3),
    (r"mlp\.layers\.0\.", "mlp.proj_in."),
    (r"mlp\.layers\.1\.", "mlp.proj_out."),
    (r"^image_encoder\.trunk\.patch_embed\.proj\.", "vision_encoder.backbone.patch_embed.projection."),
    (r"^image_encoder\.trunk\.", "vision_encoder.backbone."),
    (r"^image_encoder\.neck\.convs\.(\d+)\.conv\.", r"vision_encoder.neck.convs.\1."),
    (r"output_upscaling\.0\.", "upscale_conv1."),
    (r"output_upscaling\.1\.", "upscale_layer_norm."),
    (r"output_upscaling\.3\.", "upscale_conv2."),
    (r"mask_downscaling\.0\.", "mask_embed.conv1."),
    (r"mask_downscaling\.1\.", "mask_embed.layer_norm1."),
    (r"mask_downscaling\.3\.", "mask_embed.conv2."),
    (r"mask_downscaling\.4\.", "mask_embed.layer_norm2."),
    (r"mask_downscaling\.6\.", "mask_embed.conv3."),
    *((rf"mask_downsampler\.encoder\.{3 * n}\.", f"mask_downsampler.layers.{n}.conv.") for n in range(4)),
    *((rf"mask_downsampler\.encoder\.{3 * n + 1}\.", f"mask_downsampler.layers.{n}.layer_norm.") for n in range(4)),
    (r"mask_downsampler\.encoder\.12\.", "mask_downsampler.final_conv."),
    (r"memory_encoder\.out_proj\.", "memory_encoder.projection."),
    (r"pix_feat_proj", "feature_projection"),
    (r"fuser\.layers", "memory_fuser.layers"),
    (r"dwconv", "depthwise_conv"),
    (r"pwconv", "pointwise_conv"),
    (r"\.gamma$", ".scale"),
    (r"\.out_proj\.", ".o_proj."),
    (r"\.norm", ".layer_norm"),
    (r"^sam_mask_decoder\.", "mask_decoder."),
    (r"^sam_prompt_encoder\.pe_layer\.positional_encoding_gaussian_matrix", "prompt_encoder.shared_embedding.positional_embedding"),
    (r"^sam_prompt_encoder\.", "prompt_encoder."),
    (r"^obj_ptr_tpos_proj", "temporal_positional_encoding_projection_layer"),
    (r"^obj_ptr_proj", "object_pointer_proj"),
    (r"^maskmem_tpos_enc", "memory_temporal_positional_encoding"),
    (r"^no_mem_embed", "no_memory_embedding"),
    (r"^no_mem_pos_enc", "no_memory_positional_encoding"),
    (r"^no_obj_ptr", "no_object_pointer"),
    (r"^no_obj_embed_spatial", "occlusion_spatial_embedding_parameter"),
)  # fmt: skip
"""Applied one after the other to the stock package's names."""
_POINTS, _POINT_TABLE = "sam_prompt_encoder.point_embeddings.{n}.weight", "prompt_encoder.point_embed.weight"
_PLACES, _PLACES_AGAIN = (
    "prompt_encoder.shared_embedding.positional_embedding",
    "shared_image_embedding.positional_embedding",
)


def transformers_name(name: str) -> str:
    """Return transformers' name of a tensor; the four point embeddings are one table there."""
    for pattern, replacement in _RULES:
        name = re.sub(pattern, replacement, name)
    return name


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the stock package's tensors."""
    points = [_POINTS.format(n=n) for n in range(4)]
    renamed = {transformers_name(name): tensor for name, tensor in state.items() if name not in points}
    renamed[_POINT_TABLE] = torch.cat([state[name] for name in points])
    return renamed | {_PLACES_AGAIN: renamed[_PLACES].clone()}


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a Sam2VideoModel back. Names that no SAM2 has keep theirs, so that loading
    refuses them."""

    def count(layers: str) -> int:
        return 1 + max(
            (int(match[1]) for name in state if (match := re.match(rf"{layers}\.(\d+)\.", name))), default=0
        )

    blocks = count(r"vision_encoder\.backbone\.blocks")
    attention, fuser = count(r"memory_attention\.layers"), count(r"memory_encoder\.memory_fuser\.layers")
    with init_empty_weights(include_buffers=False):
        stages = (1, 1, blocks - 3, 1)
        largest = Grounding(
            GroundingConfig(
                stages=stages, memory_layers=attention, fuser_layers=fuser, temporal_pointers=True
            )
        )
    back = {transformers_name(name): name for name in largest.state_dict()}
    back |= {transformers_name(f"image_encoder.trunk.blocks.{n}.proj.{end}"): f"image_encoder.trunk.blocks.{n}.proj.{end}"
             for n in range(blocks) for end in ("weight", "bias")}  # fmt: skip
    renamed = {
        back.get(name, name): tensor
        for name, tensor in state.items()
        if name not in (_POINT_TABLE, _PLACES_AGAIN)
    }
    return renamed | {_POINTS.format(n=n): state[_POINT_TABLE][[n]] for n in range(4)}


def transformers_config(config: GroundingConfig) -> dict[str, Any]:
    """Return the config.json of a Sam2VideoModel of these sizes, without its optional post-processing."""
    image, heads = config.image_size, [config.heads * 2**i for i in range(4)]
    backbone = {
        "model_type": "sam2_hiera_det_model", "hidden_size": config.embed,
        "num_attention_heads": config.heads, "image_size": [image, image],
        "blocks_per_stage": list(config.stages), "embed_dim_per_stage": config.trunk_channels[::-1],
        "num_attention_heads_per_stage": heads, "window_size_per_stage": list(config.windows),
        "global_attention_blocks": list(config.global_blocks),
        "window_positional_embedding_background_size": list(config.background),
    }  # fmt: skip
    vision = {
        "model_type": "sam2_vision_model", "backbone_config": backbone,
        "backbone_channel_list": config.trunk_channels,
        "backbone_feature_sizes": [[image // 4] * 2, [image // 8] * 2, [image // 16] * 2],
        "fpn_hidden_size": config.width, "fpn_top_down_levels": list(config.top_down_levels),
    }  # fmt: skip
    decoder = {
        "hidden_size": config.width,
        "iou_head_hidden_dim": 256,
        "dynamic_multimask_via_stability": False,
    }
    return {
        "model_type": TRANSFORMERS_TYPE, "architectures": ["Sam2VideoModel"], "image_size": image,
        "vision_config": vision, "prompt_encoder_config": {"hidden_size": config.width, "image_size": image},
        "mask_decoder_config": decoder, "num_maskmem": config.memory_frames,
        "max_object_pointers_in_encoder": config.max_object_pointers,
        "enable_occlusion_spatial_embedding": config.temporal_pointers,
        "enable_temporal_pos_encoding_for_object_pointers": config.temporal_pointers,
        "memory_attention_hidden_size": config.width, "memory_attention_num_layers": config.memory_layers,
        "memory_attention_feed_forward_hidden_size": config.memory_feedforward,
        "memory_attention_rope_feat_sizes": [image // 16, image // 16],
        "memory_encoder_hidden_size": config.width, "memory_encoder_output_channels": config.memory_width,
        "mask_downsampler_embed_dim": config.width, "memory_fuser_num_layers": config.fuser_layers,
        "memory_fuser_embed_dim": config.width, "memory_fuser_intermediate_dim": 4 * config.width,
    }  # fmt: skip


def read_transformers_config(file: Path) -> GroundingConfig:
    """Read the sizes from the config.json of a Sam2VideoModel; a size that it leaves out is transformers'
    default.

    Raises ValueError for a malformed file and for pictures that are not square.
    """
    with folders.reading(file):
        try:
            config: Any = Sam2VideoConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except StrictDataclassError as error:
            raise ValueError(f"no configuration of transformers' Sam2VideoModel ({error})") from error
        sides = {config.image_size} if isinstance(config.image_size, int) else set(config.image_size)
        if len(sides) != 1:
            raise ValueError(
                f"image_size {list(config.image_size)} is not square; ANS runs SAM2 on square pictures only"
            )
    vision, trunk = config.vision_config, config.vision_config.backbone_config
    return GroundingConfig(
        image_size=sides.pop(),
        embed=trunk.hidden_size,
        heads=trunk.num_attention_heads_per_stage[0],  # num_attention_heads is 1 in every published one
        stages=tuple(trunk.blocks_per_stage),
        global_blocks=tuple(trunk.global_attention_blocks),
        windows=tuple(trunk.window_size_per_stage),
        background=tuple(trunk.window_positional_embedding_background_size),
        width=vision.fpn_hidden_size,
        top_down_levels=tuple(vision.fpn_top_down_levels),
        memory_layers=config.memory_attention_num_layers,
        memory_feedforward=config.memory_attention_feed_forward_hidden_size,
        memory_width=config.memory_encoder_output_channels,
        fuser_layers=config.memory_fuser_num_layers,
        memory_frames=config.num_maskmem,
        max_object_pointers=config.max_object_pointers_in_encoder,
        temporal_pointers=config.enable_temporal_pos_encoding_for_object_pointers,
    )


def save_transformers(sam2: Grounding, path: Path) -> None:
    """Write a folder for `Sam2VideoModel.from_pretrained`, whole or not at all. Raises ValueError for a
    memory width that it can't have."""
    if (width := sam2.config.memory_width) != TRANSFORMERS_WIDTH:
        raise ValueError(
            f"transformers' Sam2VideoModel has memories of width {TRANSFORMERS_WIDTH} only, this SAM2's "
            f"have {width}"
        )
    state = {name: tensor.contiguous() for name, tensor in to_transformers(stock_state(sam2)).items()}
    with atomic_folder(path, size=sum(t.numel() * t.element_size() for t in state.values())) as partial:
        save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(transformers_config(sam2.config), indent=1) + "\n")
        folders.write_manifest(partial, {})
