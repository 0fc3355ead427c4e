"""config.json of Qwen-VL bases and of Sa2VA releases on them <-> transformers' configuration as a dict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ans_core import prompts
from ans_core.checkpoints import folder as folders
from ans_core.model.backbones import BACKBONES
from ans_core.model.backbones.qwen_vl import QwenVL

KINDS = ("qwen2_5_vl", "qwen3_vl")
TOKENS = {
    "image_token_id": prompts.QWEN_IMAGE.slot,
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": prompts.QWEN_IMAGE.start,
    "vision_end_token_id": prompts.QWEN_IMAGE.end,
}
LEFT_OUT = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
    "model_type",
)
"""Keys that say nothing about a model's sizes."""
CLASSES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration"}


def kind_of(values: Mapping[str, Any]) -> str | None:
    """Return the kind of Qwen-VL that config.json describes; None for another model."""
    vision = values.get("vision_config")
    named = str(vision.get("model_type", "")) if isinstance(vision, Mapping) else ""
    return next((kind for kind in KINDS if named.removesuffix("_vision") == kind), None)


def sizes_of(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return transformers' configuration of what config.json describes. Qwen2.5-VL's bases have the text
    model's sizes at the top level; where there is a `text_config`, it counts, since upstream's converter
    leaves stale copies beside it."""
    text = values.get("text_config") or {
        key: value for key, value in values.items() if key not in ("vision_config", *TOKENS)
    }
    if not isinstance(text, Mapping):
        raise ValueError(f"'text_config' is {text!r}, not the sizes of a model")
    named = [key for key in TOKENS if key in values]
    return {
        "text_config": _text(text, kind),
        "vision_config": _filtered(values["vision_config"]) | {"model_type": f"{kind}_vision"},
        **{key: values[key] for key in named},
        "tie_word_embeddings": False,
    }


def _filtered(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in LEFT_OUT}


def _text(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Rotary settings as transformers 5 names them: one dict with theta in it."""
    text = _filtered(values)
    rope = dict(text.pop("rope_parameters", None) or text.pop("rope_scaling", None) or {})
    rope.pop("type", None)
    # transformers' old name for sections with default frequencies
    if rope.get("rope_type", "default") == "mrope":
        rope["rope_type"] = "default"
    theta = text.pop("rope_theta", rope.get("rope_theta"))
    if theta is None or "mrope_section" not in rope:
        raise ValueError("the text model has no 'rope_theta' or no 'mrope_section'")
    return {key: value for key, value in text.items() if key not in (*TOKENS, "vision_token_id")} | {
        "model_type": f"{kind}_text",
        "rope_parameters": {"rope_type": "default", **rope, "rope_theta": float(theta)},
        "tie_word_embeddings": False,
    }


def upstream_config(sizes: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Write transformers' configuration as a release on this kind has it, for upstream's classes and
    transformers 4.57."""
    text = dict(sizes["text_config"])
    rope = dict(text.pop("rope_parameters"))
    theta = rope.pop("rope_theta")
    return {
        "model_type": "sa2va_chat",
        "architectures": ["Sa2VAChatModelQwen"],
        "auto_map": {
            "AutoConfig": "configuration_sa2va_chat.Sa2VAChatConfigQwen",
            "AutoModel": "modeling_sa2va_qwen.Sa2VAChatModelQwen",
            "AutoModelForCausalLM": "modeling_sa2va_qwen.Sa2VAChatModelQwen",
        },
        **{key: value for key, value in sizes.items() if key in TOKENS},
        "text_config": {**text, "rope_scaling": rope, "rope_theta": theta, "use_cache": True},
        "vision_config": {**sizes["vision_config"], "model_type": kind},
        "tie_word_embeddings": False,
    }


COLOURS: dict[str, dict[str, tuple[float, float, float]]] = {
    kind: {"image_mean": backbone.mean, "image_std": backbone.std}
    for kind, backbone in BACKBONES.items()
    if issubclass(backbone, QwenVL)
}
"""Kind -> what pictures are scaled by, under the keys of preprocessor_config.json."""
PROCESSOR_SIZES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Sizes in preprocessor_config.json -> the same in `vision_config`."""


PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
VIDEO_PROCESSORS = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}


def processor_files(
    sizes: Mapping[str, Any], kind: str, *, min_pixels: int, max_pixels: int
) -> dict[str, dict[str, Any]]:
    """Write what AutoProcessor reads beside the tokenizer, by file name: upstream's classes cut pictures with
    it. It states no number of frames, as upstream gives a clip's frames as pictures."""
    shared = {
        **COLOURS[kind],
        **{key: sizes["vision_config"][size] for key, size in PROCESSOR_SIZES.items()},
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "processor_class": PROCESSORS[kind],
    }
    return {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", **shared},
        "video_preprocessor_config.json": {"video_processor_type": VIDEO_PROCESSORS[kind], **shared},
    }


def check_processor(path: Path, vision: Mapping[str, Any], *, kind: str) -> None:
    """Raise ValueError if preprocessor_config.json cuts or scales pictures otherwise than the weights take
    them. Its pixel limits don't count: upstream sets its own."""
    file = path / "preprocessor_config.json"
    if not file.exists():
        return
    with folders.reading(file):
        values = json.loads(file.read_text(encoding="utf-8"))
        for key, colour in COLOURS.get(kind, {}).items():
            if key in values and not np.allclose(values[key], colour, atol=1e-6):
                raise ValueError(
                    f"{key!r} is {values[key]}, but {kind} takes {list(colour)}; copy the file of the same "
                    "model"
                )
        for key, size in PROCESSOR_SIZES.items():
            if key in values and size in vision and values[key] != vision[size]:
                raise ValueError(
                    f"{key!r} is {values[key]}, but the weights' vision_config has {size!r} {vision[size]}; "
                    "copy the file of the same model"
                )
