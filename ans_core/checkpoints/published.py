"""The published Sa2VA sizes, known without a download: a profile's name in, its configuration or an empty
model out.

Sizes of the model cards and of InternVL2.5's and Qwen-VL's config.json. Where weights are loaded, their own
config.json counts instead.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ans_core import prompts
from ans_core.checkpoints import checkpoint, qwen_config
from ans_core.model.config import Sa2VAConfig
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import Network


def _vit_300m() -> dict[str, Any]:
    return {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "attention_bias": True,
    }


def _vit_6b() -> dict[str, Any]:
    wide = {
        "hidden_size": 3200,
        "num_hidden_layers": 45,
        "num_attention_heads": 25,
        "intermediate_size": 12800,
    }
    return {**wide, "attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}


def _text(
    model_type: str, *, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int
) -> dict[str, Any]:
    """Make a text config. Vocabularies are InternVL2.5's with the five Sa2VA tokens: Qwen2.5 151,679,
    InternLM2.5 92,558."""
    qwen = model_type == "qwen2"
    return {
        "model_type": model_type,
        "vocab_size": 151679 if qwen else 92558,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6 if qwen else 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
        if qwen
        else {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
        "tie_word_embeddings": False,
    }


def _config(vision: dict[str, Any], text: dict[str, Any], template: str) -> Sa2VAConfig:
    tower = {"image_size": [448, 448], "patch_size": [14, 14], "use_mean_pooling": True, **vision}
    sizes = {
        "vision_config": tower,
        "text_config": text,
        "image_token_id": special_token_ids(text["vocab_size"])[prompts.IMG_CONTEXT],
        "image_seq_length": 256,
        "downsample_ratio": 0.5,
        "tie_word_embeddings": False,
    }
    return Sa2VAConfig(backbone=sizes, max_tiles=12, grounding=GroundingConfig(), template=template)


def special_token_ids(vocabulary: int) -> dict[str, int]:
    """Return the ids of the special tokens: InternVL's nine and Sa2VA's five are the last of every published
    vocabulary, in this order."""
    tokens = (*prompts.INTERNVL_TOKENS, *prompts.SA2VA_TOKENS)
    return {token: vocabulary - len(tokens) + place for place, token in enumerate(tokens)}


QWEN_TOKENS = {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655}


def _qwen(kind: str, vision: dict[str, Any], text: dict[str, Any], *, vocabulary: int) -> Sa2VAConfig:
    """Vocabularies are those of the tokenizers with the five Sa2VA tokens, not the padded ones of the
    bases."""
    text |= {
        "model_type": f"{kind}_text",
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    vision |= {"model_type": f"{kind}_vision", "num_heads": 16, "out_hidden_size": text["hidden_size"]}
    tokens = {
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }
    backbone = {"text_config": text, "vision_config": vision, **tokens, "tie_word_embeddings": False}
    return Sa2VAConfig(kind=kind, backbone=backbone, grounding=GroundingConfig(), template="qwen_chat")


def _qwen3_vl(*, hidden: int, layers: int, heads: int, mlp: int) -> Sa2VAConfig:
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "deepstack_visual_indexes": [5, 11, 17],
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return _qwen("qwen3_vl", vision, text, vocabulary=151674)


def _qwen2_5_vl(*, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> Sa2VAConfig:
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return _qwen("qwen2_5_vl", vision, text, vocabulary=151670)


PUBLISHED = MappingProxyType(
    {
        "sa2va-1b": _config(
            _vit_300m(), _text("qwen2", hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864), "qwen_chat"
        ),
        "sa2va-4b": _config(
            _vit_300m(), _text("qwen2", hidden=2048, layers=36, heads=16, kv_heads=2, mlp=11008), "phi3_chat"
        ),
        "sa2va-8b": _config(
            _vit_300m(),
            _text("llama", hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
            "internlm2_chat",
        ),
        "sa2va-26b": _config(
            _vit_6b(),
            _text("llama", hidden=6144, layers=48, heads=48, kv_heads=8, mlp=16384),
            "internlm2_chat",
        ),
        "sa2va-qwen3-2b": _qwen3_vl(hidden=2048, layers=28, heads=16, mlp=6144),
        "sa2va-qwen3-4b": _qwen3_vl(hidden=2560, layers=36, heads=32, mlp=9728),
        "sa2va-qwen25-3b": _qwen2_5_vl(hidden=2048, layers=36, heads=16, kv_heads=2, mlp=11008),
        "sa2va-qwen25-7b": _qwen2_5_vl(hidden=3584, layers=28, heads=28, kv_heads=4, mlp=18944),
    }
)
"""Configurations by profile. The 4B's template is phi3_chat, as its release says, though its text model is
Qwen2.5-3B."""


def build_meta(name: str) -> Network:
    """Build the model on the meta device: shapes without memory. Its tokenizer knows the special tokens, at
    their published ids, and the template's stop words; it maps all other words to one id."""
    if name not in PUBLISHED:
        raise ValueError(f"no published size {name!r}; there are {', '.join(PUBLISHED)}")
    config = PUBLISHED[name]
    ids = special_token_ids(config.backbone["text_config"]["vocab_size"])
    if config.kind in qwen_config.KINDS:
        ids = QWEN_TOKENS | {token: ids[token] for token in prompts.SA2VA_TOKENS}
    ids |= {word: 1 + place for place, word in enumerate(prompts.TEMPLATES[config.template].stop_words)}
    words = Tokenizer(models.WordLevel({"<unk>": 0, **ids}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(list(ids))
    return checkpoint.empty(config, PreTrainedTokenizerFast(tokenizer_object=words))
