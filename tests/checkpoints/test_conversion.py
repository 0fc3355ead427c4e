"""Checkpoint folders between layouts: tensors byte by byte, configurations, and what upstream's training
saved."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ans_core.checkpoints import bases, checkpoint, conversion, folder, layouts, upstream_files
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from ans_core.pretrain.build import build_tiny
from ans_core.types import Request
from tests.checkpoints.test_checkpoint import same, tiny
from tests.golden import GOLDEN, needs_golden


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in folder.tensors(folder.weight_files(path))}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """In every byte."""
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype
        and one[k].shape == other[k].shape
        and torch.equal(one[k].view(-1).view(torch.uint8), other[k].view(-1).view(torch.uint8))
        for k in one
    )


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("max_shard", ["5GB", "100KB"])
def test_a_release_comes_back_with_the_same_bytes(tmp_path: Path, max_shard: str):
    release = GOLDEN / "qwen2"
    conversion.convert(release, tmp_path / "native", to="native", max_shard=max_shard, metadata={})
    conversion.convert(
        tmp_path / "native", tmp_path / "back", to="upstream", max_shard=max_shard, metadata={}
    )
    assert equal(tensors(release), tensors(tmp_path / "back"))
    assert (len(folder.weight_files(tmp_path / "back")) > 1) == (max_shard == "100KB")
    assert same(checkpoint.load(release), Sa2VA.from_pretrained(tmp_path / "native"))
    assert same(checkpoint.load(release), checkpoint.load(tmp_path / "back"))
    assert checkpoint.load(tmp_path / "back").config == checkpoint.load(release).config


@pytest.mark.slow
def test_our_own_model_survives_upstreams_layout_in_its_dtype(tmp_path: Path):
    checkpoint.save(copy.deepcopy(tiny()).to(torch.bfloat16), tmp_path / "own", metadata={})
    conversion.convert(tmp_path / "own", tmp_path / "up", to="upstream", metadata={})
    conversion.convert(tmp_path / "up", tmp_path / "again", to="native", metadata={})
    assert equal(tensors(tmp_path / "own"), tensors(tmp_path / "again"))
    assert {t.dtype for t in tensors(tmp_path / "up").values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"fuser_layers": 3},
        {"fuser_layers": 1, "top_down_levels": (2,)},
        {"top_down_levels": ()},
        {"max_object_pointers": 3},
    ],
)
def test_every_size_of_sam2_survives_both_layouts(tmp_path: Path, sizes: dict[str, Any]):
    model = build_tiny(
        replace(tiny().config, grounding=replace(tiny().config.grounding, **sizes)), tiny().tokenizer, seed=0
    )
    checkpoint.save(model, tmp_path / "own", metadata={})
    conversion.convert(tmp_path / "own", tmp_path / "up", to="upstream", metadata={})
    conversion.convert(tmp_path / "up", tmp_path / "again", to="native", metadata={})
    conversion.convert(tmp_path / "again", tmp_path / "up again", to="upstream", metadata={})
    assert conversion.account(tmp_path / "up").problems == ()
    assert checkpoint.load(tmp_path / "up").config.grounding == model.config.grounding
    for one, other, part in (("own", "again", "grounding"), ("up", "up again", "tiny_sam2_config")):
        assert equal(tensors(tmp_path / one), tensors(tmp_path / other))
        assert (
            len(
                {
                    json.dumps(json.loads((tmp_path / name / "config.json").read_text())[part])
                    for name in (one, other)
                }
            )
            == 1
        )
    sam2 = checkpoint.load(tmp_path / "up").sam2
    assert len(sam2.memory_encoder.fuser.layers) == sizes.get("fuser_layers", 2)
    assert sam2.image_encoder.neck.fpn_top_down_levels == list(sizes.get("top_down_levels", (2, 3)))
    assert sam2.max_obj_ptrs_in_encoder == sizes.get("max_object_pointers", 16)


@pytest.mark.slow
@pytest.mark.parametrize(("frames", "choice"), [(3, "uniform"), (5, "uniform"), (2, "first"), (5, "first")])
def test_frames_of_a_clip_survive_upstreams_layout(tmp_path: Path, frames: int, choice: Any):
    model = copy.deepcopy(tiny())
    model.config = replace(model.config, video_frames=frames, frame_choice=choice)
    checkpoint.save(model, tmp_path / "own", metadata={})
    conversion.convert(tmp_path / "own", tmp_path / "up", to="upstream", metadata={})
    conversion.convert(tmp_path / "up", tmp_path / "again", to="native", metadata={})
    conversion.convert(tmp_path / "again", tmp_path / "up again", to="upstream", metadata={})
    for name in ("up", "again", "up again"):
        loaded = checkpoint.load(tmp_path / name).config
        assert (loaded.video_frames, loaded.frame_choice) == (frames, choice)
    assert json.loads((tmp_path / "up/config.json").read_text()) == json.loads(
        (tmp_path / "up again/config.json").read_text()
    )
    assert ("ans" in json.loads((tmp_path / "up/config.json").read_text())) == (
        (frames, choice) != (5, "first")
    )


@needs_golden
def test_the_sizes_of_sam2_are_written_as_upstream_wrote_them():
    theirs = json.loads((GOLDEN / "training_pth/base_sam2/tiny_sam2_config.json").read_text())
    written = layouts.upstream_sizes(layouts.grounding_config(theirs))
    assert json.loads(json.dumps(written)) == theirs | {"max_obj_ptrs_in_encoder": 16}


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl", "qwen3_vl"])
def test_a_model_of_ours_is_written_with_the_keys_shapes_dtypes_and_settings_of_upstreams_folder(
    tmp_path: Path, name: str
):
    """Of a model that was saved by us, so that no file of the release is copied. Settings that a release has
    beside ours are defaults."""
    checkpoint.save(checkpoint.load(GOLDEN / name), tmp_path / "own", metadata={})
    conversion.convert(tmp_path / "own", tmp_path / "up", to="upstream", metadata={})
    assert equal(tensors(GOLDEN / name), tensors(tmp_path / "up"))
    theirs, written = (
        json.loads((path / "config.json").read_text()) for path in (GOLDEN / name, tmp_path / "up")
    )
    wanted = {
        "auto_map",
        "model_type",
        "template",
        "vision_config",
        "llm_config" if name == "qwen2" else "text_config",
    }
    assert wanted <= written.keys() & theirs.keys()
    assert (written["auto_map"], written["model_type"]) == (theirs["auto_map"], theirs["model_type"])
    assert {"tokenizer.json", "tokenizer_config.json"} < {file.name for file in (tmp_path / "up").iterdir()}


def test_shards_are_merged_without_another_change(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "cut", max_shard="100KB", metadata={})
    assert len(folder.weight_files(tmp_path / "cut")) > 2
    conversion.convert(tmp_path / "cut", tmp_path / "whole", to="native", metadata={"why": "test"})
    assert [f.name for f in folder.weight_files(tmp_path / "whole")] == ["model.safetensors"]
    assert equal(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert json.loads((tmp_path / "cut/config.json").read_text()) == json.loads(
        (tmp_path / "whole/config.json").read_text()
    )
    folder.verify(tmp_path / "whole")


@needs_golden
@pytest.mark.parametrize("name", ["qwen2", "internlm2", "phi3"])
def test_a_configuration_comes_back_from_upstreams(name: str):
    """All that ours holds; what upstream's has beside it are defaults of its classes."""
    values = json.loads((GOLDEN / name / "config.json").read_text())
    config = layouts.from_upstream_config(values, checkpoint.read_tokenizer(GOLDEN / name))
    written = upstream_files.upstream_config(config)
    assert layouts.from_upstream_config(written, checkpoint.read_tokenizer(GOLDEN / name)) == config
    for part in (written, written["vision_config"], written["llm_config"]):
        theirs = (
            values
            if part is written
            else values["vision_config"]
            if part is written["vision_config"]
            else values["llm_config"]
        )
        same_keys = [
            k
            for k in part.keys() & theirs.keys()
            if k not in ("vision_config", "llm_config", "tiny_sam2_config")
        ]
        assert {k: part[k] for k in same_keys} == {k: theirs[k] for k in same_keys}


@pytest.mark.slow
@needs_golden
def test_the_account_of_a_release_and_of_a_base():
    release = conversion.account(GOLDEN / "qwen2")
    assert (release.kind, release.problems, release.dtypes) == ("upstream", (), ("float32",))
    assert release.parameters == sum(t.numel() for t in tensors(GOLDEN / "qwen2").values())
    assert conversion.account(GOLDEN / "training_pth/base_internvl").kind == "InternVL base"
    assert conversion.account(GOLDEN / "training_pth/base_internvl").problems == ()


@pytest.mark.slow
@needs_golden
def test_every_tensor_that_is_not_as_it_should_be_is_listed(tmp_path: Path):
    shutil.copytree(GOLDEN / "qwen2", tmp_path / "m")
    state = load_file(tmp_path / "m/model.safetensors")
    state["mlp1.9.weight"] = state.pop("mlp1.3.weight")
    state["mlp1.1.bias"] = torch.zeros(3)
    save_file(state, tmp_path / "m/model.safetensors")
    problems = conversion.account(tmp_path / "m").problems
    assert problems == (
        "1 missing: internvl.model.multi_modal_projector.linear_2.weight",
        "1 unexpected: mlp1.9.weight",
        "1 mis-shaped: internvl.model.multi_modal_projector.linear_1.bias (3,) for (64,)",
    )
    with pytest.raises(ValueError, match=r"1 unexpected: mlp1\.9\.weight"):
        conversion.convert(tmp_path / "m", tmp_path / "out", to="native", metadata={})
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_file_that_is_not_as_the_manifest_has_it_is_a_problem(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path, metadata={})
    assert conversion.account(tmp_path).problems == ()
    state = load_file(tmp_path / "model.safetensors")
    save_file({key: tensor * 2 for key, tensor in state.items()}, tmp_path / "model.safetensors")
    (problem,) = conversion.account(tmp_path).problems
    assert "model.safetensors is damaged, or was edited" in problem


def as_internlm2() -> Network:
    """Of the tiny sizes, with InternLM2's text model, whose attention is one matrix in upstream's layout."""
    config = copy.deepcopy(tiny().config)
    config.backbone["text_config"] |= {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
    return build_tiny(replace(config, template="internlm2_chat"), tiny().tokenizer, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [31, 32])
def test_a_packed_matrix_of_other_rows_is_named(tmp_path: Path, rows: int):
    """Of 64 rows: 4 queries, 2 keys, 2 values of 8 each. 32 can be cut, into less; 31 can't."""
    checkpoint.save(as_internlm2(), tmp_path / "own", metadata={})
    conversion.convert(tmp_path / "own", tmp_path / "up", to="upstream", metadata={})
    (tmp_path / "up/manifest.json").unlink()
    state = load_file(tmp_path / "up/model.safetensors")
    key = "language_model.model.layers.0.attention.wqkv.weight"
    assert state[key].shape == (64, 32)
    save_file(state | {key: torch.zeros(rows, 32)}, tmp_path / "up/model.safetensors")
    said = "; ".join(conversion.account(tmp_path / "up").problems)
    assert (
        (key in said)
        if rows != 32
        else ("mis-shaped" in said and "layers.0.self_attn.q_proj.weight (16, 32) for (32, 32)" in said)
    )
    with pytest.raises(ValueError, match="does not fit the model"):
        checkpoint.load(tmp_path / "up")


@pytest.mark.slow
def test_whole_numbers_are_no_weights(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    (tmp_path / "m/manifest.json").unlink()
    state = load_file(tmp_path / "m/model.safetensors")
    state["text_hidden_fcs.0.weight"] = state["text_hidden_fcs.0.weight"].to(torch.int8)
    save_file(state, tmp_path / "m/model.safetensors")
    assert conversion.account(tmp_path / "m").problems == (
        "1 not of floating point: text_hidden_fcs.0.weight int8",
    )
    with pytest.raises(ValueError, match=r"1 not of floating point: text_hidden_fcs\.0\.weight int8"):
        checkpoint.load(tmp_path / "m")


# Beside the weights


@pytest.mark.slow
@needs_golden
def test_a_release_keeps_its_files_in_upstreams_layout(tmp_path: Path):
    """Byte by byte, but for weights, their index, config.json and the manifest. Code that reads one layout
    does not go into the other."""
    shutil.copytree(GOLDEN / "qwen2", tmp_path / "release")
    (tmp_path / "release/modeling_sa2va_chat.py").write_text("raise SystemExit('ran')")
    (tmp_path / "release/generation_config.json").write_text("{ }")
    conversion.convert(
        tmp_path / "release", tmp_path / "again", to="upstream", max_shard="100KB", metadata={}
    )
    written_anew = {"model.safetensors", "config.json", "manifest.json"}
    kept = {f.name for f in (tmp_path / "release").iterdir()} - written_anew
    assert kept >= {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "modeling_sa2va_chat.py",
        "generation_config.json",
    }
    assert all(
        (tmp_path / "again" / name).read_bytes() == (tmp_path / "release" / name).read_bytes()
        for name in kept
    )
    assert not (tmp_path / "again/model.safetensors").exists()
    assert same(checkpoint.load(tmp_path / "again"), checkpoint.load(GOLDEN / "qwen2"))
    conversion.convert(tmp_path / "release", tmp_path / "native", to="native", metadata={})
    assert not (tmp_path / "native/modeling_sa2va_chat.py").exists()


def test_upstreams_libraries_know_the_tokenizer_that_is_written(tmp_path: Path):
    """transformers 4.42 has no TokenizersBackend, and tokenizers 0.19 reads merges as strings. We read
    both."""
    model = copy.deepcopy(tiny())
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    model.tokenizer.save_pretrained(tmp_path / "plain")
    upstream_files.write_tokenizer(model.tokenizer, tmp_path / "up")
    settings = json.loads((tmp_path / "up/tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["additional_special_tokens"]) == (
        "PreTrainedTokenizerFast",
        ["<extra>"],
    )
    assert settings.keys().isdisjoint({"backend", "extra_special_tokens"})
    merges = json.loads((tmp_path / "up/tokenizer.json").read_text())["model"]["merges"]
    assert "r e" in merges
    assert len(merges) == len(json.loads((tmp_path / "plain/tokenizer.json").read_text())["model"]["merges"])
    one, other = checkpoint.read_tokenizer(tmp_path / "plain"), checkpoint.read_tokenizer(tmp_path / "up")
    assert one.get_vocab() == other.get_vocab()
    text = "a red circle[SEG]<extra> left\nof é"
    assert one.encode(text) == other.encode(text)
    assert one.special_tokens_map == other.special_tokens_map


@pytest.mark.slow
def test_a_target_with_something_else_in_it_is_refused(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    (tmp_path / "models/precious").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(
        ValueError, match=r"models holds precious, which no earlier conversion wrote; give another folder"
    ):
        conversion.convert(tmp_path / "m", tmp_path / "models", to="native", metadata={})
    with pytest.raises(ValueError, match=r"file is a file"):
        conversion.convert(tmp_path / "m", tmp_path / "file", to="native", metadata={})
    metadata = {"stage": "convert", "source": str(tmp_path / "m")}
    for _ in range(2):  # into nothing, and over what was written
        conversion.convert(tmp_path / "m", tmp_path / "other", to="native", metadata=metadata)
    (tmp_path / "other/notes.txt").touch()
    with pytest.raises(ValueError, match=r"other holds notes\.txt"):
        conversion.convert(tmp_path / "m", tmp_path / "other", to="native", metadata={})
    assert {f.name for f in tmp_path.iterdir()} == {"m", "models", "file", "other", "other.partial"}
    assert (tmp_path / "models/precious").is_dir()


# Phi3


@pytest.mark.parametrize(
    ("metadata", "refused"),
    [
        ({"stage": "convert", "source": "some/model"}, False),
        ({"stage": "convert", "source": "another/model"}, True),
        ({"stage": "convert", "profile": "tiny", "seed": 0}, True),  # the pipeline's model
        ({"stage": "sft", "source": "some/model"}, True),
        ({}, True),
    ],
)
def test_a_conversion_replaces_what_one_of_the_same_source_wrote_alone(
    tmp_path: Path, metadata: dict[str, Any], refused: bool
):
    (tmp_path / "config.json").touch()
    folder.write_manifest(tmp_path, metadata)
    message = "holds a model that no earlier conversion of some/model wrote; give another folder"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        folder.refuse_to_replace(tmp_path, "some/model")


def phi3(**changes: object) -> dict[str, object]:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
    }
    tokenizer = tiny().tokenizer
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    values = {
        "model_type": "phi3",
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "rope_theta": 1e4,
        "rope_scaling": None,
    }
    return {**values, **sizes, **ends, "sliding_window": 2047, **changes}


@pytest.mark.parametrize(("window", "context"), [(262144, 2048), (40, 40), (None, 2048)])
def test_phi3s_window_ends_the_context_and_comes_back(window: int | None, context: int):
    config = layouts.text_config(phi3(sliding_window=window))
    assert (config["sliding_window"], config["max_position_embeddings"]) == (None, context)
    back = upstream_files.upstream_config(
        replace(tiny().config, backbone=tiny().config.backbone | {"text_config": config})
    )["llm_config"]
    assert (back["sliding_window"], back["max_position_embeddings"]) == (window, 2048)
    assert layouts.text_config(back) == config


def test_answers_with_phi3_do_not_depend_on_the_batch():
    """20 and 47 tokens are asked and 10 are said: in a batch, with a window of 48, padding would push the
    first token out of the window."""
    config = copy.deepcopy(tiny().config)
    config.backbone["text_config"] = layouts.text_config(phi3(sliding_window=48))
    model = Sa2VA(config, tiny().tokenizer).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.internvl.parameters():
            if p.ndim == 2:
                p.copy_(0.6 * torch.randn(p.shape, generator=generator))
    asked = [Request(frames=(), text=text) for text in ("a", "a red circle left of a blue square, " * 3)]
    alone, together = (model.predict_many(asked, max_tokens=10, batch=batch) for batch in (1, 2))
    assert [a.text for a in alone] == [a.text for a in together]


def test_phi3s_first_name_of_long_rope_is_read_and_written():
    scaling = {"type": "su", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    config = layouts.text_config(
        phi3(rope_scaling=scaling, sliding_window=262144, original_max_position_embeddings=512)
    )
    assert config["rope_parameters"]["rope_type"] == "longrope"
    back = upstream_files.upstream_config(
        replace(tiny().config, backbone=tiny().config.backbone | {"text_config": config})
    )["llm_config"]
    assert back["rope_scaling"] == scaling


def test_a_file_that_was_cut_short_is_named(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    file = tmp_path / "m/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors .* cut short"):
        conversion.account(tmp_path / "m")


def test_other_families_are_refused_by_name(tmp_path: Path):
    for model_type, said in (
        ("sa2va_sam3", "built on sam3"),
        ("sa2va_llava", "built on llava"),
        ("bert", "known are"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ValueError, match=said):
            conversion.account(tmp_path)


@needs_golden
def test_a_base_alone_is_no_model(tmp_path: Path):
    with pytest.raises(ValueError, match="half of a Sa2VA"):
        conversion.convert(GOLDEN / "training_pth/base_internvl", tmp_path / "out", to="native", metadata={})


# Upstream's training states

PAIR = GOLDEN / "training_pth"


def trained(state: Path, **changes: float) -> Network:
    return conversion.from_training_state(
        state, internvl=PAIR / "base_internvl", sam2=PAIR / "base_sam2", template="qwen_chat", **changes
    )


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("written", ["safetensors", "state_dict", "whole", "saved modules"])
def test_a_training_state_on_its_bases_is_the_merged_release(tmp_path: Path, written: str):
    """Of the trained tensors alone, as .safetensors and .pth; of a whole merged model; with the infixes of
    PEFT's saved modules."""
    state = load_file(PAIR / "training_state_dict.safetensors")
    expected = checkpoint.load(PAIR / "merged_hf")
    if written == "whole":
        merged = load_file(PAIR / "merged_hf/model.safetensors")
        state = {
            ("mllm.model." + k if k.startswith(("vision_model", "mlp1", "language_model")) else k).replace(
                "g_weight", "gamma"
            ): v
            for k, v in merged.items()
        }
    if written == "saved modules":
        state = {
            k.replace("embed_tokens.weight", "embed_tokens.modules_to_save.default.weight"): v
            for k, v in state.items()
        }
        state |= {
            k.replace("modules_to_save.default", "original_module"): v + 1
            for k, v in state.items()
            if "modules_to_save" in k
        }
    file = tmp_path / "iter_1.pth"
    if written == "safetensors":
        file = PAIR / "training_state_dict.safetensors"
    else:
        torch.save({"state_dict": state, "meta": {"iter": 1}}, file)
    model = trained(file)
    base = bases.import_base(PAIR / "base_internvl", PAIR / "base_sam2", "qwen_chat").sam2
    expected.sam2.original_mask_decoder, expected.sam2.config = base.original_mask_decoder, base.config
    assert model.config == replace(expected.config, grounding=base.config)
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=1e-6), name


@pytest.mark.slow
@needs_golden
def test_lora_merged_at_another_strength_is_another_model():
    theirs = checkpoint.load(PAIR / "merged_hf").state_dict()
    ours = trained(PAIR / "training_state_dict.safetensors", alpha_per_rank=1.0).state_dict()
    name = "internvl.model.language_model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(ours[name], theirs[name], atol=1e-4)


@needs_golden
def test_keys_of_a_training_state_that_fit_nothing_are_listed(tmp_path: Path):
    state = load_file(PAIR / "training_state_dict.safetensors")
    half = next(k for k in state if "layers.1.mlp.up_proj.lora_B" in k)
    del state[half]
    state["mllm.model.mlp9.weight"] = torch.zeros(2)
    state["text_hidden_fcs.0.bias"] = torch.zeros(2)
    save_file(state, tmp_path / "bad.safetensors")
    with pytest.raises(
        ValueError,
        match=r"1 missing: language_model\.model\.layers\.1\.mlp\.up_proj\.lora_B; 1 unexpected: mllm\.model\.mlp9\.weight; 1 mis",
    ) as told:
        trained(tmp_path / "bad.safetensors")
    assert "text_hidden_fcs.0.bias (2,) for (64,)" in str(told.value)


@pytest.mark.slow
@needs_golden
def test_a_training_state_is_accounted_for_beside_its_bases(tmp_path: Path):
    bases = {"internvl": PAIR / "base_internvl", "sam2": PAIR / "base_sam2", "template": "qwen_chat"}
    state = load_file(PAIR / "training_state_dict.safetensors")
    whole = load_file(PAIR / "merged_hf/model.safetensors")
    told = conversion.training_account(PAIR / "training_state_dict.safetensors", **bases)
    assert told == conversion.Account(
        kind="training state with LoRA unmerged",
        tensors=len(state),
        parameters=sum(t.numel() for t in state.values()),
        dtypes=("float32",),
        problems=(),
    )
    torch.save(whole, tmp_path / "whole.pth")
    assert conversion.training_account(tmp_path / "whole.pth", **bases) == conversion.Account(
        kind="training state",
        tensors=len(whole),
        parameters=sum(t.numel() for t in whole.values()),
        dtypes=("float32",),
        problems=(),
    )
    del state["text_hidden_fcs.0.bias"]
    torch.save(state | {"odd": torch.zeros(2)}, tmp_path / "bad.pth")
    assert conversion.training_account(tmp_path / "bad.pth", **bases).problems == (
        "1 missing: text_hidden_fcs.0.bias",
        "1 unexpected: odd",
    )
    whole["text_hidden_fcs.0.bias"][3] = torch.inf
    torch.save(whole, tmp_path / "inf.pth")
    (problem,) = conversion.training_account(tmp_path / "inf.pth", **bases).problems
    assert problem.startswith("1 with weights that are NaN or infinite: text_hidden_fcs.0.bias (")
    with pytest.raises(ValueError, match=re.escape(problem)):
        trained(tmp_path / "inf.pth")


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize(
    ("left_out", "count", "named"),
    [
        ("text_hidden_fcs", 4, "text_hidden_fcs.2.weight"),
        ("mlp1.", 6, "mlp1.0.bias"),
        ("embed_tokens", 1, "language_model.model.embed_tokens.weight"),
        ("lm_head", 1, "language_model.lm_head.weight"),
        ("model.layers.1.", 14, "language_model.model.layers.1.mlp.down_proj.lora_A"),
        ("q_proj.lora", 4, "language_model.model.layers.0.self_attn.q_proj.lora_B"),
        ("sam_mask_decoder", 131, "grounding_encoder.sam2_model.sam_mask_decoder.conv_s0.bias"),
        ("", 143, "grounding_encoder.sam2_model.sam_mask_decoder.conv_s0.bias"),
    ],
)
def test_what_a_training_state_lacks_is_listed(tmp_path: Path, left_out: str, count: int, named: str):
    state = load_file(PAIR / "training_state_dict.safetensors")
    torch.save({"state_dict": {k: v for k, v in state.items() if left_out not in k}}, tmp_path / "iter_1.pth")
    with pytest.raises(ValueError, match=rf"{count} missing: ") as told:
        trained(tmp_path / "iter_1.pth")
    listed, _, more = str(told.value).split("missing: ")[1].partition(" and ")
    missing = listed.split(", ")
    assert len(missing) == min(count, 10)
    assert more == (f"{count - 10} more" if count > 10 else "")
    assert named in missing


@needs_golden
def test_a_whole_state_is_whole(tmp_path: Path):
    """With one tensor of what upstream freezes in it, all are wanted."""
    state = load_file(PAIR / "merged_hf/model.safetensors")
    del state["vision_model.encoder.layers.0.ls1"], state["language_model.model.norm.weight"]
    torch.save(state, tmp_path / "whole.pth")
    with pytest.raises(
        ValueError,
        match=r"2 missing: language_model\.model\.norm\.weight, vision_model\.encoder\.layers\.0\.ls1$",
    ):
        trained(tmp_path / "whole.pth")


@needs_golden
def test_mis_shaped_halves_of_lora_are_listed(tmp_path: Path):
    state = load_file(PAIR / "training_state_dict.safetensors")
    prefix = "mllm.model.language_model.base_model.model.model.layers."
    state[f"{prefix}0.mlp.up_proj.lora_A.default.weight"] = torch.zeros(8, 3)
    state[f"{prefix}1.mlp.up_proj.lora_B.default.weight"] = torch.zeros(128, 4)
    state[f"{prefix}1.self_attn.q_proj.lora_B.default.weight"] = torch.zeros(64, 8, dtype=torch.int8)
    save_file(state, tmp_path / "bad.safetensors")
    name = r"language_model\.model\.layers\."
    said = rf"2 mis-shaped: {name}0\.mlp\.up_proj\.lora_A \(8, 3\) for \(8, 64\), {name}1\.mlp\.up_proj\.lora_B \(128, 4\) for \(128, 8\);"
    with pytest.raises(
        ValueError, match=said + rf" 1 not of floating point: {name}1\.self_attn\.q_proj\.lora_B int8"
    ):
        trained(tmp_path / "bad.safetensors")


def pickled_history(monkeypatch: pytest.MonkeyPatch) -> object:
    """An object whose pickle is that of mmengine's curves: a class of another package with numpy arrays and
    its own methods in it. The class is gone from the modules when the file is read, and would fail the test
    if it were called."""
    module = types.ModuleType("mmengine.logging.history_buffer")

    class HistoryBuffer:
        def mean(self) -> float:
            return 0.0

        def __getstate__(self) -> dict[str, object]:
            history = {
                "_log_history": np.array([0.5, 0.25]),
                "_count_history": np.array([1, 1]),
                "last": np.float64(0.25),
            }
            return {"max_length": 10, "statistics_methods": {"mean": HistoryBuffer.mean}, **history}

        def __setstate__(self, state: object) -> None:
            raise AssertionError("foreign code ran")

    for thing in (HistoryBuffer, HistoryBuffer.mean):
        thing.__module__, thing.__qualname__ = module.__name__, thing.__qualname__.rpartition("<locals>.")[2]
    module.HistoryBuffer = HistoryBuffer  # type: ignore[attr-defined]
    for name in ("mmengine", "mmengine.logging"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return HistoryBuffer()


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("folder_of_deepspeed", [False, True])
def test_what_upstreams_training_loop_saves_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_of_deepspeed: bool
):
    """mmengine's file with its curves; DeepSpeed's folder of that name, with the weights under `module`."""
    state = load_file(PAIR / "training_state_dict.safetensors")
    with monkeypatch.context() as patch:
        beside = {"meta": {"iter": 10}, "message_hub": {"log_scalars": {"loss": pickled_history(patch)}}}
        if folder_of_deepspeed:
            (tmp_path / "iter_10.pth").mkdir()
            torch.save(
                {"module": state, "ds_version": "0.16", **beside},
                tmp_path / "iter_10.pth/mp_rank_00_model_states.pt",
            )
        else:
            torch.save({"state_dict": state, **beside}, tmp_path / "iter_10.pth")
    ours, theirs = (
        trained(tmp_path / "iter_10.pth").state_dict(),
        checkpoint.load(PAIR / "merged_hf").state_dict(),
    )
    assert all(torch.allclose(ours[name], tensor, atol=1e-6) for name, tensor in theirs.items())


def test_the_folder_around_deepspeeds_folders_is_followed_to_the_last_one(tmp_path: Path):
    for step in (10, 20):
        (tmp_path / f"global_step{step}").mkdir()
        (tmp_path / f"global_step{step}/mp_rank_00_model_states.pt").touch()
    with pytest.raises(ValueError, match=r"give one: .*/global_step10, .*/global_step20"):
        conversion.training_file(tmp_path)
    one = tmp_path / "global_step10/mp_rank_00_model_states.pt"
    assert conversion.training_file(one.parent) == conversion.training_file(one) == one
    (tmp_path / "latest").write_text("global_step10\n")
    assert conversion.training_file(tmp_path) == one
    (tmp_path / "latest").write_text("global_step30")
    with pytest.raises(ValueError, match=r"latest names global_step30, which is not there"):
        conversion.training_file(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "last_checkpoint").write_text("/elsewhere/work_dirs/global_step20")  # mmengine's
    assert conversion.training_file(tmp_path) == tmp_path / "global_step20/mp_rank_00_model_states.pt"
    with pytest.raises(
        ValueError,
        match=r"is a training state of DeepSpeed: `ans convert .* DST --internvl BASE --sam2 SAM2`",
    ):
        checkpoint.load(tmp_path)
    assert conversion.training_file(tmp_path / "absent") is None


@pytest.mark.slow
@needs_golden
def test_weights_that_zero_3_divided_are_read_as_the_message_says(tmp_path: Path):
    """One process's state, written as DeepSpeed does: shapes in one file, all trained numbers in a row in
    another."""
    state = {
        name: tensor.float() for name, tensor in load_file(PAIR / "training_state_dict.safetensors").items()
    }
    step, rank = tmp_path / "global_step10", "zero_pp_rank_0_mp_rank_00"
    step.mkdir()
    shapes = {name: tensor.shape for name, tensor in state.items()}
    weights = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [shapes],
        "shared_params": {},
        "frozen_param_shapes": None,
    }
    torch.save(
        weights | {"frozen_param_fragments": None, "ds_version": "0.19"}, step / f"{rank}_model_states.pt"
    )
    numbers = torch.cat([tensor.flatten() for tensor in state.values()])
    moments = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": [numbers]}
    torch.save({"optimizer_state_dict": moments}, step / f"{rank}_optim_states.pt")
    (tmp_path / "latest").write_text("global_step10")
    with pytest.raises(ValueError, match=r"ZeRO-3 .* OUT/pytorch_model\.bin$") as caught:
        trained(tmp_path)
    command = re.search("`python (.*?)`", str(caught.value))[1].replace("OUT", str(tmp_path / "out"))
    subprocess.run([sys.executable, *command.split()], check=True, capture_output=True)
    ours, theirs = (
        trained(tmp_path / "out/pytorch_model.bin").state_dict(),
        checkpoint.load(PAIR / "merged_hf").state_dict(),
    )
    assert all(torch.allclose(ours[name], tensor, atol=1e-6) for name, tensor in theirs.items())


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("harm", ["cut", "garbage", "empty", "old format"])
def test_a_training_state_or_sam2_that_cant_be_read_is_named(tmp_path: Path, harm: str):
    file = tmp_path / "iter_1.pth"
    torch.save({"x": torch.zeros(100)}, file, _use_new_zipfile_serialization=harm != "old format")
    data = {
        "cut": file.read_bytes()[:-30],
        "garbage": b"garbage" * 9,
        "empty": b"",
        "old format": file.read_bytes(),
    }
    file.write_bytes(data[harm])
    with pytest.raises(
        ValueError,
        match=r"iter_1\.pth is no file that torch.save .* cut short; copy it again, or save its tensors alone",
    ):
        trained(file)
    file.rename(tmp_path / "sam2.pt")
    with pytest.raises(ValueError, match=r'sam2\.pt is no file .*torch\.save\(\{"model"'):
        list(bases.sam2_tensors(tmp_path / "sam2.pt"))


@needs_golden
def test_no_pickled_code_of_a_training_state_is_run(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("ran",))

    torch.save({"state_dict": {"x": Evil()}}, tmp_path / "evil.pth")
    with pytest.raises(
        ValueError, match=r"evil\.pth names print, code that is not run; save its tensors alone"
    ):
        trained(tmp_path / "evil.pth")
