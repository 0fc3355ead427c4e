"""Names and sizes of upstream's Hugging Face layout <-> ours: a key, a tensor or a config.json in, its
counterparts out.

Upstream (Sa2VA releases, and the InternVL2.5 bases, which lack the last two parts) has `vision_model`,
`mlp1`, `language_model`, `text_hidden_fcs` and `grounding_encoder.sam2_model`; ours are the modules of
model/sa2va.py. Apart from two packed attention matrices that are cut up, only names differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ans_core import prompts
from ans_core.checkpoints import qwen_config
from ans_core.model.config import Sa2VAConfig, check_frames
from ans_core.model.grounding import GroundingConfig

TEXT_MODELS = ("qwen2", "internlm2", "phi3")
"""Text models of InternVL."""

_UP_VIT, _VIT = "vision_model.encoder.layers.{n}", "internvl.model.vision_tower.encoder.layer.{n}"
_UP_LM, _LM = "language_model.model", "internvl.model.language_model"
UP_SAM = "grounding_encoder.sam2_model"
_UP_TRAINED_DECODER = "sam_mask_decoder_modified"
"""Name of the trained decoder in a Sa2VA-i, where `sam_mask_decoder` is SAM2's original one."""

# {n} a layer's number, {p} weight or bias, {rest} anything; of several rows that fit, the first counts, in
# both directions.
_INTERNVL: dict[str, tuple[str, ...]] = {
    "vision_model.embeddings.class_embedding": ("internvl.model.vision_tower.embeddings.cls_token",),
    "vision_model.embeddings.position_embedding": (
        "internvl.model.vision_tower.embeddings.position_embeddings",
    ),
    "vision_model.embeddings.patch_embedding.{p}": (
        "internvl.model.vision_tower.embeddings.patch_embeddings.projection.{p}",
    ),
    f"{_UP_VIT}.attn.qkv.{{p}}": tuple(f"{_VIT}.attention.{x}_proj.{{p}}" for x in "qkv"),
    f"{_UP_VIT}.attn.proj.{{p}}": (f"{_VIT}.attention.projection_layer.{{p}}",),
    f"{_UP_VIT}.attn.q_norm.{{p}}": (f"{_VIT}.attention.q_norm.{{p}}",),
    f"{_UP_VIT}.attn.k_norm.{{p}}": (f"{_VIT}.attention.k_norm.{{p}}",),
    f"{_UP_VIT}.norm1.{{p}}": (f"{_VIT}.layernorm_before.{{p}}",),
    f"{_UP_VIT}.norm2.{{p}}": (f"{_VIT}.layernorm_after.{{p}}",),
    f"{_UP_VIT}.ls1": (f"{_VIT}.lambda_1",),
    f"{_UP_VIT}.ls2": (f"{_VIT}.lambda_2",),
    f"{_UP_VIT}.mlp.fc1.{{p}}": (f"{_VIT}.mlp.fc1.{{p}}",),
    f"{_UP_VIT}.mlp.fc2.{{p}}": (f"{_VIT}.mlp.fc2.{{p}}",),
    "mlp1.0.{p}": ("internvl.model.multi_modal_projector.layer_norm.{p}",),
    "mlp1.1.{p}": ("internvl.model.multi_modal_projector.linear_1.{p}",),
    "mlp1.3.{p}": ("internvl.model.multi_modal_projector.linear_2.{p}",),
}
_SHARED: dict[str, tuple[str, ...]] = {
    "text_hidden_fcs.{rest}": ("text_hidden_fcs.{rest}",),
    f"{UP_SAM}.memory_encoder.fuser.layers.{{n}}.g_weight": ("sam2.memory_encoder.fuser.layers.{n}.gamma",),
    f"{UP_SAM}.{{rest}}": ("sam2.{rest}",),
}
_TWO_DECODERS: dict[str, tuple[str, ...]] = {
    f"{UP_SAM}.{_UP_TRAINED_DECODER}.{{rest}}": ("sam2.sam_mask_decoder.{rest}",),
    f"{UP_SAM}.sam_mask_decoder.{{rest}}": ("sam2.original_mask_decoder.{rest}",),
}
_SAME_NAMES: dict[str, tuple[str, ...]] = {
    f"{_UP_LM}.{{rest}}": (f"{_LM}.{{rest}}",),
    "language_model.lm_head.{p}": ("internvl.lm_head.{p}",),
}
_INTERNLM2: dict[str, tuple[str, ...]] = {
    f"{_UP_LM}.tok_embeddings.{{p}}": (f"{_LM}.embed_tokens.{{p}}",),
    f"{_UP_LM}.layers.{{n}}.attention.wqkv.{{p}}": tuple(
        f"{_LM}.layers.{{n}}.self_attn.{x}_proj.{{p}}" for x in "qkv"
    ),
    f"{_UP_LM}.layers.{{n}}.attention.wo.{{p}}": (f"{_LM}.layers.{{n}}.self_attn.o_proj.{{p}}",),
    f"{_UP_LM}.layers.{{n}}.feed_forward.w1.{{p}}": (f"{_LM}.layers.{{n}}.mlp.gate_proj.{{p}}",),
    f"{_UP_LM}.layers.{{n}}.feed_forward.w3.{{p}}": (f"{_LM}.layers.{{n}}.mlp.up_proj.{{p}}",),
    f"{_UP_LM}.layers.{{n}}.feed_forward.w2.{{p}}": (f"{_LM}.layers.{{n}}.mlp.down_proj.{{p}}",),
    f"{_UP_LM}.layers.{{n}}.attention_norm.{{p}}": (f"{_LM}.layers.{{n}}.input_layernorm.{{p}}",),
    f"{_UP_LM}.layers.{{n}}.ffn_norm.{{p}}": (f"{_LM}.layers.{{n}}.post_attention_layernorm.{{p}}",),
    f"{_UP_LM}.norm.{{p}}": (f"{_LM}.norm.{{p}}",),
    "language_model.output.{p}": ("internvl.lm_head.{p}",),
}
_TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "qwen2": _INTERNVL | _SAME_NAMES,
    "internlm2": _INTERNVL | _INTERNLM2,
    "phi3": _INTERNVL | _SAME_NAMES,
    **{kind: {"model.{rest}": (f"{kind}.{{rest}}",)} for kind in qwen_config.KINDS},
}
_QWEN_BASES = {
    kind: {
        "model.visual.{rest}": (f"{kind}.model.visual.{{rest}}",),
        "visual.{rest}": (f"{kind}.model.visual.{{rest}}",),
        "model.language_model.{rest}": (f"{kind}.model.language_model.{{rest}}",),
        "model.{rest}": (f"{kind}.model.language_model.{{rest}}",),
        "lm_head.{p}": (f"{kind}.lm_head.{{p}}",),
    }
    for kind in qwen_config.KINDS
}
"""Names in Qwen's own repositories, of transformers 4.57 and of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Text model of an upstream checkpoint, and its attention's shape (which decides how InternLM2 packs its
    matrices)."""

    text_model: str
    """Of InternVL; else the kind of backbone."""
    queries_per_key: int = 1
    """Query heads that share a key head."""
    head_width: int = 1
    base: bool = False
    """True for a backbone's own repository, where its names differ from a release's."""
    two_decoders: bool = False
    """True for a Sa2VA-i: SAM2's original mask decoder beside the trained one."""

    def __post_init__(self) -> None:
        if self.text_model not in _TABLES:
            raise ValueError(f"text model {self.text_model!r} is not supported; {', '.join(TEXT_MODELS)} are")


def layout_of(config: Sa2VAConfig) -> Layout:
    """Return the upstream layout of a model (in our config, InternLM2 is a Llama)."""
    if config.kind in qwen_config.KINDS:
        return Layout(text_model=config.kind, two_decoders=config.grounding.original_decoder)
    text = config.backbone["text_config"]
    kind = {"llama": "internlm2"}.get(text["model_type"], text["model_type"])
    heads = text["num_attention_heads"]
    return Layout(
        text_model=kind,
        queries_per_key=heads // text["num_key_value_heads"],
        head_width=text["hidden_size"] // heads,
        two_decoders=config.grounding.original_decoder,
    )


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(r"\{n\}", r"(?P<n>\d+)").replace(r"\{p\}", "(?P<p>weight|bias)")
    return re.compile(escaped.replace(r"\{rest\}", "(?P<rest>.+)"))


@lru_cache
def _rows(layout: Layout) -> list[tuple[re.Pattern[str], str, list[re.Pattern[str]], tuple[str, ...]]]:
    names = _QWEN_BASES[layout.text_model] if layout.base else _TABLES[layout.text_model]
    table = (_TWO_DECODERS if layout.two_decoders else {}) | names | _SHARED
    return [(_pattern(up), up, [_pattern(n) for n in native], native) for up, native in table.items()]


def native_names(key: str, layout: Layout) -> tuple[str, ...]:
    """Return our names of what upstream's `key` holds: one, three for a packed q, k, v, none for a key that
    the layout does not know."""
    for pattern, _, _, native in _rows(layout):
        if match := pattern.fullmatch(key):
            return tuple(name.format(**match.groupdict()) for name in native)
    return ()


def upstream_name(name: str, layout: Layout) -> str:
    """Return upstream's key that holds our tensor `name`. Raises KeyError for a name that is not a
    Sa2VA's."""
    for _, upstream, patterns, _ in _rows(layout):
        for pattern in patterns:
            if match := pattern.fullmatch(name):
                return upstream.format(**match.groupdict())
    raise KeyError(f"{name} is no tensor of a Sa2VA with a {layout.text_model} text model")


def split(key: str, tensor: Tensor, layout: Layout) -> list[Tensor]:
    """Cut upstream's tensor into ours, in the order of native_names (views where possible)."""
    if len(native_names(key, layout)) < 2:
        return [tensor]
    if "wqkv" not in key:
        return list(tensor.chunk(3))
    group = layout.queries_per_key
    # InternLM2's rows: per key head its queries, key, value
    grouped = tensor.unflatten(0, (-1, group + 2, layout.head_width))
    return [
        grouped[:, :group].flatten(0, 2),
        grouped[:, group].flatten(0, 1),
        grouped[:, group + 1].flatten(0, 1),
    ]


def join(key: str, parts: list[Tensor], layout: Layout) -> Tensor:
    """Join our tensors to upstream's: the inverse of `split`."""
    if len(parts) == 1:
        return parts[0]
    if "wqkv" not in key:
        return torch.cat(parts)
    heads = (layout.queries_per_key, 1, 1)
    grouped = [part.unflatten(0, (-1, n, layout.head_width)) for part, n in zip(parts, heads, strict=True)]
    return torch.cat(grouped, dim=1).flatten(0, 2)


def to_native(state: Iterable[tuple[str, Tensor]], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Turn upstream's tensors into ours, one by one. Keys that are unknown, or whose rows are no whole number
    of heads, keep their name, so that loading lists them as unexpected."""
    for key, tensor in state:
        names = native_names(key, layout)
        if len(names) > 1 and not _is_cut(key, tensor, layout):
            yield f"{key} {tuple(tensor.shape)}, which can't be cut into queries, keys and values", tensor
        else:
            yield from zip(names or (key,), split(key, tensor, layout), strict=True)


def _is_cut(key: str, tensor: Tensor, layout: Layout) -> bool:
    unit = (layout.queries_per_key + 2) * layout.head_width if "wqkv" in key else 3
    return tensor.ndim > 0 and len(tensor) > 0 and len(tensor) % unit == 0


def to_upstream(state: Mapping[str, Tensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Turn our tensors into upstream's, one by one, in our order. Raises KeyError when a part of a packed
    matrix is missing."""
    done = set()
    for name in state:
        key = upstream_name(name, layout)
        if key not in done:
            done.add(key)
            yield key, join(key, [state[part] for part in native_names(key, layout)], layout)


# config.json

_SHARED_TEXT_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "attention_dropout",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
_TEXT_KEYS = {
    "qwen2": ("use_sliding_window", "sliding_window", "max_window_layers"),
    "internlm2": (),
    "phi3": ("original_max_position_embeddings", "resid_pdrop", "embd_pdrop"),
}
SCALINGS = {"su": "longrope"}
"""Phi3's early names of rotary scalings -> transformers' names."""
SAM_KEYS = {
    "image_size": "image_size", "embed": "embed_dim", "heads": "num_heads",
    "stages": "stages", "global_blocks": "global_att_blocks",
    "windows": "window_spec", "background": "window_pos_embed_bkg_spatial_size", "width": "d_model",
    "memory_layers": "mem_layers",
    "memory_feedforward": "mem_ffn", "memory_width": "mem_dim", "memory_frames": "num_maskmem",
}  # fmt: skip
SAM_KEYS_OF_RELEASES = {
    "top_down_levels": "fpn_top_down_levels", "fuser_layers": "fuser_layers",
    "max_object_pointers": "max_obj_ptrs_in_encoder",
}  # fmt: skip
"""Sizes that may be missing: the defaults are those of every release."""
SAM_KEYS_OF_OTHERS = ("backbone_channel_list", "rope_feat_sizes")
"""Sizes that follow from others: the trunk's channels from its width; the rotary table, computed anew for
each picture, from its size."""


def vision_config(upstream: Mapping[str, Any]) -> dict[str, Any]:
    """Turn upstream's `vision_config` (InternViT 300M or 6B) into transformers' InternVLVisionConfig as a
    dict."""
    copied = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "norm_type",
        "layer_norm_eps",
    )
    return {
        **{key: upstream[key] for key in copied},
        "image_size": [upstream["image_size"]] * 2,
        "patch_size": [upstream["patch_size"]] * 2,
        "attention_bias": upstream["qkv_bias"],
        "use_qk_norm": upstream["qk_normalization"],
        "use_mean_pooling": True,  # = no norm after the last layer
        "attention_dropout": 0.0,
        "hidden_dropout_prob": 0.0,
        "projection_dropout": 0.0,
    }


def text_config(upstream: Mapping[str, Any]) -> dict[str, Any]:
    """Turn upstream's `llm_config` into transformers' Qwen2Config, LlamaConfig (for InternLM2) or Phi3Config
    as a dict.

    Phi3's sliding window is left out: transformers counts padding as tokens in it, so answers of a batch
    would differ from answers one by one. Without it the numbers are the same up to `sliding_window` tokens,
    so the context ends there. (InternVL2-4B's Phi-3-mini-128k has a window of 262,144 tokens in a context of
    131,072: nothing changes. Phi-3-mini-4k has 2,047 in 4,096.) Both are remembered as `upstream_*`, for the
    way back.
    """
    kind = upstream.get("model_type")
    if kind not in TEXT_MODELS:
        raise ValueError(f"text model {kind!r} is not supported; {', '.join(TEXT_MODELS)} are")
    config = {key: upstream[key] for key in (*_SHARED_TEXT_KEYS, *_TEXT_KEYS[kind]) if key in upstream}
    scaling = dict(upstream.get("rope_scaling") or {"type": "default"})
    rope_type = scaling.pop("type", None) or scaling.pop("rope_type")
    rope = {"rope_type": SCALINGS.get(rope_type, rope_type), "rope_theta": upstream["rope_theta"], **scaling}
    if kind == "internlm2":
        config |= {"attention_bias": upstream["bias"], "mlp_bias": False}
    if kind == "phi3":
        window, context = upstream.get("sliding_window"), upstream["max_position_embeddings"]
        if window and window < context and rope_type != "default":
            raise ValueError(
                f"sliding_window {window} in a context of {context} with rope_scaling {rope_type!r} is not "
                "supported"
            )
        config |= {"sliding_window": None, "max_position_embeddings": min(window or context, context)}
        config |= {"upstream_sliding_window": window, "upstream_max_position_embeddings": context}
    return {
        **config,
        "model_type": {"internlm2": "llama"}.get(kind, kind),
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }


def grounding_config(sizes: Mapping[str, Any] | None, *, two_decoders: bool = False) -> GroundingConfig:
    """Read the sizes of a SAM2; None is hiera-large, as in every release. Small test checkpoints write theirs
    as `tiny_sam2_config`.

    Raises ValueError for a key that is not known, and for channels that Hiera can't have.
    """
    if sizes is None:
        return GroundingConfig(original_decoder=two_decoders)
    valid_keys = (*SAM_KEYS.values(), *SAM_KEYS_OF_RELEASES.values(), *SAM_KEYS_OF_OTHERS)
    if unknown := sorted(sizes.keys() - set(valid_keys)):
        raise ValueError(
            f"SAM2's sizes hold {unknown}, which would have no effect; known are {', '.join(valid_keys)}"
        )
    values: dict[str, Any] = {ours: sizes[theirs] for ours, theirs in SAM_KEYS.items()}
    values |= {ours: sizes[theirs] for ours, theirs in SAM_KEYS_OF_RELEASES.items() if theirs in sizes}
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    config = GroundingConfig(original_decoder=two_decoders, **values)
    if (channels := sizes.get("backbone_channel_list", config.trunk_channels)) != config.trunk_channels:
        raise ValueError(
            f"'backbone_channel_list' is {channels}; with 'embed_dim' {config.embed} it is "
            f"{config.trunk_channels}"
        )
    return config


def upstream_sizes(config: GroundingConfig) -> dict[str, Any]:
    """Write the sizes of a SAM2 as `grounding_config` reads them."""
    sizes = {theirs: getattr(config, ours) for ours, theirs in (SAM_KEYS | SAM_KEYS_OF_RELEASES).items()}
    return sizes | {
        "backbone_channel_list": config.trunk_channels,
        "rope_feat_sizes": [config.image_size // 16] * 2,
    }


TINY_PICTURES = "tiny_predict_forward"
"""Key under which small test checkpoints on Qwen-VL write the limits of their pictures."""
OWN = "ans"
"""Key in upstream's config.json for settings that upstream's layout has no place for. Upstream's code ignores
it."""
OWN_DEFAULTS = {
    "video_frames": 5,
    "frame_choice": "first",
    "seg_object_score": False,
    "min_pixels": None,
    "max_pixels": None,
}
"""The settings kept under OWN, with upstream's values. Only other values are written."""


def ans_settings(config: Sa2VAConfig) -> dict[str, Any]:
    """Return what goes under OWN: the settings that differ from upstream's."""
    settings = {key: getattr(config, key) for key in OWN_DEFAULTS}
    changed = {key: value for key, value in settings.items() if value != OWN_DEFAULTS[key]}
    return {OWN: changed} if changed else {}


def _read_ans_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    stored = values.get(OWN, {})
    if not isinstance(stored, Mapping) or not stored.keys() <= OWN_DEFAULTS.keys():
        raise ValueError(f"{OWN!r} is {stored!r}; it holds nothing but {', '.join(OWN_DEFAULTS)}")
    settings = OWN_DEFAULTS | dict(stored)
    check_frames(settings["video_frames"], settings["frame_choice"])
    return settings


def check_sam2(keys: Collection[str]) -> None:
    """Raise ValueError for upstream keys whose grounding encoder is not SAM2."""
    grounding = [key for key in keys if key.startswith(f"{UP_SAM}.")]
    if grounding and not any(key.startswith(f"{UP_SAM}.image_encoder.") for key in grounding):
        raise ValueError(
            f"its grounding encoder is no SAM2 (it has {grounding[0]} and no image_encoder); releases on "
            "SAM3 are not read (docs/backbones.md says why)"
        )


def has_two_decoders(keys: Iterable[str]) -> bool:
    """Say whether upstream keys are those of a Sa2VA-i. Its config.json does not tell."""
    return any(key.startswith(f"{UP_SAM}.{_UP_TRAINED_DECODER}.") for key in keys)


def from_upstream_config(
    values: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str | None = None,
    sam2: GroundingConfig | None = None,
    two_decoders: bool = False,
) -> Sa2VAConfig:
    """Turn config.json of an upstream folder into ours. Give `template` and `sam2` for a base, which has
    neither. `two_decoders`: see `has_two_decoders`."""
    grounding = sam2 or grounding_config(values.get("tiny_sam2_config"), two_decoders=two_decoders)
    if kind := qwen_config.kind_of(values):
        sizes = qwen_config.sizes_of(values, kind)
        limits = {
            key: value
            for key, value in values.get(TINY_PICTURES, {}).items()
            if key in ("min_pixels", "max_pixels")
        }
        return Sa2VAConfig(
            kind=kind,
            backbone=sizes,
            grounding=grounding,
            template=template or values["template"],
            **_read_ans_settings(values) | limits,
        )
    if "llm_config" not in values and isinstance(values.get("text_config"), Mapping):
        parts = (values.get("vision_config"), values["text_config"])
        named = ", ".join(str(part.get("model_type")) for part in parts if isinstance(part, Mapping))
        raise ValueError(
            f"it is built on {named}; only Sa2VAs on InternVL and Qwen-VL are read (docs/backbones.md says "
            "why)"
        )
    for key in ("vision_config", "llm_config"):
        if not isinstance(values[key], Mapping):
            raise ValueError(f"{key!r} is {values[key]!r}, not the sizes of a model")
    for key, supported in (("select_layer", -1), ("ps_version", "v2")):
        if (actual := values[key]) != supported:
            raise ValueError(f"{key!r} is {actual!r}; only {supported!r}, as in every release, is supported")
    vision = values["vision_config"]
    ratio, side = values["downsample_ratio"], vision["image_size"] // vision["patch_size"]
    sizes = {
        "vision_config": vision_config(vision),
        "text_config": text_config(values["llm_config"]),
        "image_token_id": tokenizer.convert_tokens_to_ids(prompts.IMG_CONTEXT),
        "image_seq_length": int(side * ratio) ** 2,
        "downsample_ratio": ratio,
        "tie_word_embeddings": False,
    }
    return Sa2VAConfig(
        backbone=sizes,
        grounding=grounding,
        template=template or values["template"],
        max_tiles=values["max_dynamic_patch"] if values["dynamic_image_size"] else 1,
        **_read_ans_settings(values),
    )
