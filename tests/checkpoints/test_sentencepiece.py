from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.convert_slow_tokenizer import import_protobuf

from ans_core.checkpoints import checkpoint
from ans_core.data.collate import prefix_ids

BYTES = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *BYTES]  # ids 0-258
PIECES += [("▁a", -0.0, 1), ("ed", -1.0, 1), ("red", -2.0, 1), ("▁red", -3.0, 1), ("▁", -4.0, 1)]  # 259-263
PIECES += [(letter, -5.0, 1) for letter in "reda"] + [("[UNUSED_TOKEN_0]", 0.0, 4)]  # 264-267, 268


def write(folder: Path, *, prefix: bool, added: dict[int, str]) -> None:
    proto = import_protobuf().ModelProto()
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True
    proto.normalizer_spec.add_dummy_prefix = prefix
    for text, score, kind in PIECES:
        piece = proto.pieces.add()
        piece.piece, piece.score, piece.type = text, score, kind
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    decoder = {str(place): {"content": text, "special": True} for place, text in added.items()}
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "added_tokens_decoder": decoder}))


def test_pieces_special_tokens_and_bytes_get_sentencepieces_ids(tmp_path: Path):
    """Merges by score: e+d, r+ed, ▁+red. é is two bytes, C3 and A9. `<|im_end|>` replaces the unused piece
    268."""
    write(tmp_path, prefix=True, added={1: "<s>", 2: "</s>", 268: "<|im_end|>", 269: "[SEG]"})
    tokenizer = checkpoint.read_tokenizer(tmp_path)
    text = "red<|im_end|>a red é[SEG]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [262, 268, 259, 262, 263, 3 + 0xC3, 3 + 0xA9, 269]
    assert len(tokenizer) == 270
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode(tokenizer.encode("red a é", add_special_tokens=False)) == "red a é"


def test_no_space_is_put_before_the_text_where_the_file_says_so(tmp_path: Path):
    write(tmp_path, prefix=False, added={})
    tokenizer = checkpoint.read_tokenizer(tmp_path)
    assert tokenizer.encode("red red", add_special_tokens=False) == [261, 262]
    assert tokenizer.decode([261, 262]) == "red red"


def test_texts_begin_with_the_token_that_begins_them_as_in_training(tmp_path: Path):
    """InternLM2Tokenizer adds it unless tokenizer_config.json says no; training rows bring it themselves."""
    write(tmp_path, prefix=True, added={1: "<s>", 2: "</s>"})
    tokenizer = checkpoint.read_tokenizer(tmp_path)
    assert tokenizer.encode("red a") == [1, 262, 259]
    assert prefix_ids(tokenizer, template="internlm2_chat", frame_tokens=[]) == tokenizer.encode(
        "<|im_start|>user\n"
    )
    tokenizer.save_pretrained(tmp_path / "ours")
    assert checkpoint.read_tokenizer(tmp_path / "ours").encode("red a") == [1, 262, 259]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert checkpoint.read_tokenizer(tmp_path).encode("red a") == [262, 259]


def test_a_special_token_beyond_a_gap_is_refused(tmp_path: Path):
    write(tmp_path, prefix=True, added={300: "[SEG]"})
    with pytest.raises(ValueError, match=r"these would move: \{'\[SEG\]': 269\}"):
        checkpoint.read_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no tokenizer"):
        checkpoint.read_tokenizer(tmp_path)
