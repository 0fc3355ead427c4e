"""Files of upstream's layout beside the weights: config.json and tokenizer made of ours, or the files of a
release as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ans_core.checkpoints import checkpoint, layouts, qwen_config
from ans_core.checkpoints import folder as folders
from ans_core.model.backbones.qwen_vl import MAX_PIXELS, MIN_PIXELS
from ans_core.model.config import Sa2VAConfig
from ans_core.model.grounding import GroundingConfig

NEW_SETTINGS = ("backend", "is_local", "local_files_only", "extra_special_tokens")
"""Settings of a tokenizer that only transformers 5 knows."""
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
"""Suffixes of files with weights."""


def copy_release(source: Path, target: Path, *, code: bool) -> None:
    """Copy every file of a release but its weights, config.json and manifest, byte by byte: tokenizer,
    generation settings, model card, and with `code` the Python files of its classes, which are not run."""
    left_out = {"config.json", folders.MANIFEST}
    for file in sorted(source.iterdir()):
        if (
            file.is_file()
            and file.name not in left_out
            and not file.name.endswith(WEIGHTS)
            and (code or file.suffix != ".py")
        ):
            shutil.copyfile(file, target / file.name)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer for upstream's code with transformers 4.42. Its classes are not transformers 5's,
    extra tokens have another key there, and merges are strings, which tokenizers before 0.20 want and newer
    ones read as well."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings = {key: value for key, value in settings.items() if key not in NEW_SETTINGS}
    settings["additional_special_tokens"] = tokenizer.extra_special_tokens
    file.write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    if "merges" in values["model"]:
        values["model"]["merges"] = [" ".join(pair) for pair in values["model"]["merges"]]
    file.write_text(json.dumps(values, ensure_ascii=False) + "\n", encoding="utf-8")


def write_processor(config: Sa2VAConfig, folder: Path) -> None:
    """Write the files by which upstream's code cuts pictures for a Qwen-VL; another backbone has none."""
    if config.kind not in qwen_config.KINDS:
        return
    limits = {"min_pixels": config.min_pixels or MIN_PIXELS, "max_pixels": config.max_pixels or MAX_PIXELS}
    for name, values in qwen_config.processor_files(config.backbone, config.kind, **limits).items():
        (folder / name).write_text(json.dumps(values, indent=1) + "\n")


def upstream_config(config: Sa2VAConfig) -> dict[str, Any]:
    """Turn our configuration into upstream's config.json, as `layouts.from_upstream_config` reads it and
    upstream's classes need it."""
    vision, text = config.backbone["vision_config"], config.backbone["text_config"]
    released = replace(config.grounding, original_decoder=False) == GroundingConfig()
    sizes = {} if released else {"tiny_sam2_config": layouts.upstream_sizes(config.grounding)}
    if config.kind in qwen_config.KINDS:
        written = qwen_config.upstream_config(config.backbone, config.kind)
        return written | {"template": config.template, **sizes, **layouts.ans_settings(config)}
    side = vision["image_size"][0]
    return {
        "model_type": checkpoint.RELEASE_TYPE,
        "architectures": ["Sa2VAChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_sa2va_chat.Sa2VAChatConfig",
            "AutoModel": "modeling_sa2va_chat.Sa2VAChatModel",
            "AutoModelForCausalLM": "modeling_sa2va_chat.Sa2VAChatModel",
        },
        "vision_config": _vision(vision),
        "llm_config": _text(text),
        "template": config.template,
        "dynamic_image_size": (config.max_tiles or 1) > 1,
        "max_dynamic_patch": config.max_tiles,
        "min_dynamic_patch": 1,
        "use_thumbnail": True,
        "force_image_size": side,
        "downsample_ratio": config.backbone["downsample_ratio"],
        "ps_version": "v2",
        "select_layer": -1,
        "pad2square": False,
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "hidden_size": text["hidden_size"],
        "tie_word_embeddings": False,
        **sizes,
        **layouts.ans_settings(config),
    }


def _vision(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `layouts.vision_config`."""
    copied = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        **{key: ours[key] for key in copied},
        "hidden_act": ours.get("hidden_act", "gelu"),
        "norm_type": ours.get("norm_type", "layer_norm"),
        "layer_norm_eps": ours.get("layer_norm_eps", 1e-6),
        "model_type": "intern_vit_6b",
        "architectures": ["InternVisionModel"],
        "image_size": ours["image_size"][0],
        "patch_size": ours["patch_size"][0],
        "num_channels": 3,
        "qkv_bias": ours["attention_bias"],
        "qk_normalization": ours.get("use_qk_norm", False),
        "use_flash_attn": False,
        "dropout": 0.0,
        "drop_path_rate": 0.0,
        "attention_dropout": 0.0,
    }


def _text(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `layouts.text_config`."""
    kind = {"llama": "internlm2"}.get(ours["model_type"], ours["model_type"])
    classes = {"qwen2": "Qwen2ForCausalLM", "internlm2": "InternLM2ForCausalLM", "phi3": "Phi3ForCausalLM"}
    rope = dict(ours["rope_parameters"])
    theta, scaling = rope.pop("rope_theta"), rope.pop("rope_type")
    dropped = ("rope_parameters", "attention_bias", "mlp_bias")
    config = {key: value for key, value in ours.items() if key not in dropped}
    if kind == "phi3":
        config |= {
            name: config.pop(f"upstream_{name}", config.get(name))
            for name in ("sliding_window", "max_position_embeddings")
        }
    config |= {"model_type": kind, "architectures": [classes[kind]], "rope_theta": theta}
    named = {new: old for old, new in layouts.SCALINGS.items()}.get(scaling, scaling)
    config["rope_scaling"] = None if scaling == "default" else {"type": named, **rope}
    return config | ({"bias": ours.get("attention_bias", False)} if kind == "internlm2" else {})
