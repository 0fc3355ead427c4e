"""The published Sa2VA sizes, known without a download: a profile's name in, its configuration or an empty
model out.

Sizes are those of published.yaml. Where weights are loaded, their own config.json counts instead.
"""

from __future__ import annotations

from importlib import resources

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ans_core import prompts
from ans_core.checkpoints import checkpoint, qwen_config
from ans_core.model.config import Sa2VAConfig
from ans_core.model.network import Network

SHARED = "shared"
"""Entry of the file that only holds what several sizes have in common."""


def _read() -> dict[str, Sa2VAConfig]:
    text = resources.files("ans_core.checkpoints").joinpath("published.yaml").read_text(encoding="utf-8")
    return {
        name: Sa2VAConfig.from_dict(values | {"grounding": {}})
        for name, values in yaml.safe_load(text).items()
        if name != SHARED
    }


PUBLISHED = _read()
"""Configurations by profile."""


def special_token_ids(vocabulary: int) -> dict[str, int]:
    """Return the ids of the special tokens: InternVL's nine and Sa2VA's five are the last of every published
    vocabulary, in this order."""
    tokens = (*prompts.INTERNVL_TOKENS, *prompts.SA2VA_TOKENS)
    return {token: vocabulary - len(tokens) + place for place, token in enumerate(tokens)}


QWEN_TOKENS = {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655}


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
