"""Build a tiny Sa2VA from nothing: tokenizer, configuration and random weights (the `tiny` and `smoke`
profiles)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from ans_core import prompts
from ans_core.model.backbones import BACKBONES
from ans_core.model.config import Sa2VAConfig
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import Network
from ans_core.pretrain.finding import middle_attention

CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_tokenizer(
    texts: Iterable[str], *, vocabulary: int = 1024, kind: str = "internvl"
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of Qwen2's kind on `texts`: it can write any text, and frequent words are one
    token. `kind`: of the backbone, whose image tokens it knows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=5,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    marks = BACKBONES[kind].marks
    special = (*CHAT_TOKENS, *prompts.INTERNVL_TOKENS, *prompts.SA2VA_TOKENS)
    fast.add_tokens(
        [*special, *(t for t in (marks.start, marks.slot, marks.end) if t not in special)],
        special_tokens=True,
    )
    return fast


def tiny_config(
    *,
    vision: dict[str, Any],
    language: dict[str, Any],
    grounding: GroundingConfig,
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    video_frames: int,
    kind: str = "internvl",
) -> Sa2VAConfig:
    """Return the configuration. `vision` and `language` hold the sizes of config.Vision and config.Language;
    the token count follows from the patch size."""
    config = Sa2VAConfig(
        kind=kind,
        backbone=TINY[kind].sizes(vision, language, tokenizer),
        grounding=grounding,
        template=template,
        video_frames=video_frames,
    )
    return TINY[kind].with_pictures(config, vision["image_size"])


def _internvl_sizes(
    vision: dict[str, Any], language: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    side = vision["image_size"] // vision["patch_size"] // 2
    return {
        "vision_config": {
            "image_size": [vision["image_size"]] * 2,
            "patch_size": [vision["patch_size"]] * 2,
            "hidden_size": vision["hidden"],
            "num_hidden_layers": vision["layers"],
            "num_attention_heads": vision["heads"],
            "intermediate_size": vision["mlp"],
            "use_mean_pooling": True,
            "attention_bias": True,
            "hidden_dropout_prob": 0.0,
            "projection_dropout": 0.0,
            "layer_scale_init_value": 1.0,
            "initializer_range": hidden_std(vision["hidden"]),
        },
        "text_config": _text_sizes("qwen2", language, tokenizer, {}),
        "image_token_id": tokenizer.convert_tokens_to_ids(prompts.IMG_CONTEXT),
        "image_seq_length": side * side,
        "downsample_ratio": 0.5,
        "tie_word_embeddings": False,
    }


def _qwen2_5_vl_sizes(
    vision: dict[str, Any], language: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """Windows are half of a picture wide; every other layer attends to all of it, as the published ones' 8th
    do."""
    unit = 2 * vision["patch_size"]
    sizes = {
        "model_type": "qwen2_5_vl_vision",
        "window_size": unit * max(1, vision["image_size"] // unit // 2),
        "fullatt_block_indexes": list(range(1, vision["layers"], 2)),
    }
    return _qwen_vl_sizes("qwen2_5_vl", vision, language, tokenizer, sizes, {})


def _qwen3_vl_sizes(
    vision: dict[str, Any], language: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    sizes = {
        "model_type": "qwen3_vl_vision",
        "num_position_embeddings": (vision["image_size"] // vision["patch_size"]) ** 2,
        "deepstack_visual_indexes": [0, vision["layers"] // 2],
    }
    config = _qwen_vl_sizes("qwen3_vl", vision, language, tokenizer, sizes, {"mrope_interleaved": True})
    return config | {
        "text_config": config["text_config"] | {"head_dim": language["hidden"] // language["heads"]}
    }


def _qwen_vl_sizes(
    kind: str,
    vision: dict[str, Any],
    language: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    tower: dict[str, Any],
    rope: dict[str, Any],
) -> dict[str, Any]:
    """Return transformers' configuration. `tower`, `rope`: what the kind's vision tower and rotary positions
    have of their own."""
    width = language["hidden"] // language["heads"]
    third = width // 6
    marks = BACKBONES[kind].marks
    return {
        "vision_config": {
            "depth": vision["layers"],
            "hidden_size": vision["hidden"],
            "num_heads": vision["heads"],
            "intermediate_size": vision["mlp"],
            "out_hidden_size": language["hidden"],
            "patch_size": vision["patch_size"],
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": hidden_std(vision["hidden"]),
            **tower,
        },
        "text_config": _text_sizes(
            f"{kind}_text",
            language,
            tokenizer,
            {"mrope_section": [width // 2 - 2 * third, third, third], **rope},
        ),
        "image_token_id": tokenizer.convert_tokens_to_ids(marks.slot),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids(marks.start),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids(marks.end),
        "tie_word_embeddings": False,
    }


def _text_sizes(
    model_type: str, language: dict[str, Any], tokenizer: PreTrainedTokenizerFast, rope: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": len(tokenizer),
        "hidden_size": language["hidden"],
        "num_hidden_layers": language["layers"],
        "num_attention_heads": language["heads"],
        "num_key_value_heads": language["kv_heads"],
        "intermediate_size": language["mlp"],
        "max_position_embeddings": 4096,
        "initializer_range": hidden_std(language["hidden"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, **rope},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def hidden_std(width: int) -> float:
    """Return the standard deviation of random weights: 0.7 / sqrt(width). The big models' 0.02 (with a layer
    scale of 0.1) leaves a narrow net nearly linear: it then learns colour and place, but not shape and
    texture (LOG)."""
    return 0.7 / width**0.5


def frequency_filters(patch: int, count: int) -> Float[Tensor, "count 3 patch patch"]:
    """Return a random model's patch embedding: cosines of the lowest frequencies in brightness and two colour
    contrasts, with higher frequencies amplified.

    Measured on drawn scenes, a patch's mean is 5 to 20 times as strong as the frequencies that show edges;
    random filters hide these, and shape is then learned much later than colour. The gains make all responses
    about equal.
    """
    place = torch.arange(patch) + 0.5
    waves = torch.stack(
        [
            torch.cos(math.pi * place * k / patch) * math.sqrt((1 if k == 0 else 2) / patch)
            for k in range(patch)
        ]
    )
    contrasts = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0], [1.0, 1.0, -2.0]])
    contrasts = contrasts / contrasts.norm(dim=1, keepdim=True)
    order = sorted(((u, v) for u in range(patch) for v in range(patch)), key=lambda uv: (sum(uv), uv))
    filters = []
    for u, v in order:
        gain = 0.17 if u == v == 0 else min(4.0, 0.4 * 1.55 ** (u + v))
        filters += [gain * c[:, None, None] * waves[u][:, None] * waves[v] for c in contrasts]
    if len(filters) < count:
        raise ValueError(
            f"a patch of {patch} x {patch} pixels has {len(filters)} frequencies, fewer than the vision "
            f"width {count}"
        )
    return torch.stack(filters[:count])


def sine_positions(side: int, width: int) -> Float[Tensor, "P width"]:
    """Return sines and cosines of row and column (values of size 1): attention finds a patch's neighbours
    with one linear map.

    transformers starts learned positions at 0 or 0.02: beside patches of size 1, place then stays hidden for
    hundreds of steps.
    """
    frequencies = 1 / 100 ** (torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * frequencies  # (side, width / 4)
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)  # (side, width / 2)
    rows, columns = axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


def match_by_content(attention: Any) -> None:
    """Initialise queries as keys, both orthogonal maps of the input, so that a token first attends to similar
    tokens (Trockman & Kolter 2023 find this in trained transformers). With words and image tokens in one
    space (alignment.py) this is a first guess at what is asked for (LOG)."""
    heads, width = attention.num_key_value_groups, attention.k_proj.weight.shape
    key = nn.init.orthogonal_(torch.empty(width))
    attention.k_proj.weight.data.copy_(key)
    attention.q_proj.weight.data.copy_(
        key.unflatten(0, (-1, attention.head_dim)).repeat_interleave(heads, dim=0).flatten(0, 1)
    )


def match_by_place(attention: Any) -> None:
    """Initialise SAM2's attention between prompts and image tokens likewise; their queries and keys carry the
    same positional code. A pixel first attends to the nearest click, and a click to its pixels. From plain
    random weights masks stay empty for longer (LOG)."""
    key = nn.init.orthogonal_(torch.empty(attention.k_proj.weight.shape))
    for projection in (attention.k_proj, attention.q_proj):
        projection.weight.data.copy_(key)
        projection.bias.data.zero_()


def match_same_place(attention: Any) -> None:
    """Initialise SAM2's memory attention to prefer the same place. It rotates queries and keys by their place
    (rotary positions): with equal constant biases in both, scores fall with distance, so a pixel first reads
    the memory of its own place. With it clips are learned in half the steps (LOG)."""
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.data.mul_(0.5)
        nn.init.constant_(projection.bias, 2.0)


def _start_internvit(tower: Any) -> None:
    patches = tower.embeddings.patch_embeddings.projection
    patches.weight.data.copy_(frequency_filters(patches.weight.shape[-1], patches.weight.shape[0]))
    table = tower.embeddings.position_embeddings
    table.data[0, 1:] = sine_positions(int((table.shape[1] - 1) ** 0.5), table.shape[2])


def _start_qwen_tower(tower: Any) -> None:
    """Filter each of the equal time steps alike."""
    patches = tower.patch_embed.proj
    count, _, steps, side, _ = patches.weight.shape
    patches.weight.data.copy_(
        frequency_filters(side, count)[:, :, None].expand(-1, -1, steps, -1, -1) / steps
    )
    if patches.bias is not None:
        nn.init.zeros_(patches.bias)


def _start_qwen3_tower(tower: Any) -> None:
    """Deepstack adds nothing at first: features without meaning would blur the words."""
    _start_qwen_tower(tower)
    table = tower.pos_embed.weight
    table.data.copy_(sine_positions(int(len(table) ** 0.5), table.shape[1]))
    for merger in tower.deepstack_merger_list:
        nn.init.zeros_(merger.linear_fc2.weight)
        nn.init.zeros_(merger.linear_fc2.bias)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """How a tiny model of one kind is made."""

    sizes: Callable[[dict[str, Any], dict[str, Any], PreTrainedTokenizerFast], dict[str, Any]]
    """(vision, language, tokenizer) -> transformers' configuration."""
    with_pictures: Callable[[Sa2VAConfig, int], Sa2VAConfig]
    """Set the size of pictures to that of a square with this side."""
    start: Callable[[Any], None]
    """Set the vision tower's first weights."""


def _at_one_size(config: Sa2VAConfig, side: int) -> Sa2VAConfig:
    return replace(config, min_pixels=side**2, max_pixels=side**2)


TINY = {
    "internvl": Tiny(
        sizes=_internvl_sizes,
        with_pictures=lambda config, side: replace(config, max_tiles=1),
        start=_start_internvit,
    ),
    "qwen2_5_vl": Tiny(sizes=_qwen2_5_vl_sizes, with_pictures=_at_one_size, start=_start_qwen_tower),
    "qwen3_vl": Tiny(sizes=_qwen3_vl_sizes, with_pictures=_at_one_size, start=_start_qwen3_tower),
}
"""The kinds of backbone that can be built from nothing."""


def build_tiny(config: Sa2VAConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Network:
    """Build the model with random weights drawn from `seed` alone (the caller's random state is not
    changed)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Network(config, tokenizer)
        TINY[config.kind].start(model.backbone.vision_tower)
        match_by_content(middle_attention(model))
        decoder = model.sam2.sam_mask_decoder.transformer
        for layer in decoder.layers:
            match_by_place(layer.cross_attn_token_to_image)
            match_by_place(layer.cross_attn_image_to_token)
        match_by_place(decoder.final_attn_token_to_image)
        for layer in model.sam2.memory_attention.layers:
            match_same_place(layer.cross_attn_image)
        trunk = model.sam2.image_encoder.trunk
        nn.init.trunc_normal_(trunk.pos_embed, std=0.2)
        nn.init.trunc_normal_(trunk.pos_embed_window, std=0.2)
    return model
