"""A folder with SentencePiece's `tokenizer.model` (InternLM2's bases and releases) in, a fast tokenizer out.

Such folders bring Python code for their tokenizer, which is not run: the file says everything but the names
of the special tokens, and those are in tokenizer_config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

SPACE = "▁"
BPE_MODEL = 2
CONTROL, USER_DEFINED = 3, 4
"""Kinds of pieces that are matched before anything is split."""


def fast_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer. Ids are SentencePiece's, with the beginning-of-text token in front unless
    `add_bos_token` says no; a special token that tokenizer_config.json puts at an id takes the place of the
    piece there."""
    proto = import_protobuf().ModelProto()
    proto.ParseFromString((folder / "tokenizer.model").read_bytes())
    if proto.trainer_spec.model_type != BPE_MODEL:
        raise ValueError(
            f"{folder}/tokenizer.model is no BPE (model type {proto.trainer_spec.model_type}), as "
            "InternLM2's is"
        )
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {
        int(place): token["content"] for place, token in settings.get("added_tokens_decoder", {}).items()
    }
    names = [special.get(place, piece.piece) for place, piece in enumerate(proto.pieces)]
    scores = [(name, piece.score) for name, piece in zip(names, proto.pieces, strict=True)]
    vocabulary = {name: place for place, name in enumerate(names)}
    skipped = {
        name for name, piece in zip(names, proto.pieces, strict=True) if piece.type in (CONTROL, USER_DEFINED)
    }
    skipped |= set(special.values())
    merges = generate_merges(vocabulary, scores, skip_tokens=skipped)
    unknown = names[proto.trainer_spec.unk_id]
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )
    prefixed = proto.normalizer_spec.add_dummy_prefix
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefixed else []), normalizers.Replace(" ", SPACE)]
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    user_defined = [
        n
        for n, p in zip(names, proto.pieces, strict=True)
        if p.type == USER_DEFINED and n not in special.values()
    ]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in user_defined])
    tokenizer.add_special_tokens([AddedToken(special[place], normalized=False) for place in sorted(special)])
    names_of = _names(settings)
    # InternLM2Tokenizer's default
    if settings.get("add_bos_token", True) and (begin := names_of.get("bos_token")):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"],
            pair=[begin, "$A", "$B"],
            special_tokens=[(begin, tokenizer.token_to_id(begin))],
        )
    wrong = {
        name: tokenizer.token_to_id(name)
        for place, name in special.items()
        if tokenizer.token_to_id(name) != place
    }
    if wrong:
        raise ValueError(
            f"{folder}/tokenizer_config.json: added_tokens_decoder leaves gaps in the ids; these would "
            f"move: {wrong}"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names_of)


def _names(settings: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` and so on; a token is written as its text or as {"content": text,
    ...}."""
    tokens = {
        key: settings[key]
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if settings.get(key)
    }
    return {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()}
