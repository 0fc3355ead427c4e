"""Qwen's tokenizer of 151,643 byte-level tokens from the PyPI package `dashscope`, which needs no other file
of it:

pip install --no-deps dashscope
"""

from __future__ import annotations

import base64
import importlib.util
from functools import lru_cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ans_core import prompts
from ans_core.model.network import Network
from ans_core.pretrain.build import CHAT_TOKENS, build_tiny, tiny_config
from tests import tiny

PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What Qwen2 cuts a text into before it merges bytes."""


def file() -> Path | None:
    """Return dashscope's vocabulary, or None where the package is not installed. It is not imported."""
    package = importlib.util.find_spec("dashscope")
    return (
        None
        if package is None or package.origin is None
        else Path(package.origin).parent / "resources/qwen.tiktoken"
    )


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    path = file()
    assert path is not None
    pairs = (line.split() for line in path.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    written = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(written[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        joined = [(left, right) for left, right in halves if left in ranks and right in ranks]
        joined.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(rank, text(left), text(right)) for left, right in joined]
    merges.sort(key=lambda merge: merge[0])
    fast = Tokenizer(
        models.BPE(
            {text(token): rank for token, rank in ranks.items()}, [(left, right) for _, left, right in merges]
        )
    )
    fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=CHAT_TOKENS[2], pad_token=CHAT_TOKENS[0])
    found.add_tokens([*CHAT_TOKENS, *prompts.INTERNVL_TOKENS, *prompts.SA2VA_TOKENS], special_tokens=True)
    return found


@lru_cache(maxsize=2)
def model(template: str = "qwen_chat") -> Network:
    """A tiny model with this vocabulary."""
    config = tiny_config(
        vision={"image_size": 64, "patch_size": 8, "hidden": 32, "layers": 2, "heads": 2, "mlp": 64},
        language={"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 64},
        grounding=tiny.GROUNDING,
        tokenizer=tokenizer(),
        template=template,
        video_frames=2,
    )
    return build_tiny(config, tokenizer(), seed=0).eval().requires_grad_(False)
