"""Checkpoint folders between layouts: tensors byte by byte, configurations, and what upstream's training saved."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ans_core.model import Sa2VA, checkpoint, conversion, folder, layouts
from tests.golden import GOLDEN, needs_golden
from tests.model.test_checkpoint import same, tiny


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


@needs_golden
@pytest.mark.parametrize("max_shard", ["5GB", "100KB"])
def test_a_release_comes_back_with_the_same_bytes(tmp_path: Path, max_shard: str):
    release = GOLDEN / "qwen2"
    conversion.convert(release, tmp_path / "native", to="native", max_shard=max_shard, metadata={})
    conversion.convert(tmp_path / "native", tmp_path / "back", to="upstream", max_shard=max_shard, metadata={})
    assert equal(tensors(release), tensors(tmp_path / "back"))
    assert (len(folder.weight_files(tmp_path / "back")) > 1) == (max_shard == "100KB")
    assert same(checkpoint.load(release), Sa2VA.from_pretrained(tmp_path / "native"))
    assert same(checkpoint.load(release), checkpoint.load(tmp_path / "back"))
    assert checkpoint.load(tmp_path / "back").config == checkpoint.load(release).config


def test_our_own_model_survives_upstreams_layout_in_its_dtype(tmp_path: Path):
    checkpoint.save(copy.deepcopy(tiny()).to(torch.bfloat16), tmp_path / "own", metadata={})
    conversion.convert(tmp_path / "own", tmp_path / "up", to="upstream", metadata={})
    conversion.convert(tmp_path / "up", tmp_path / "again", to="native", metadata={})
    assert equal(tensors(tmp_path / "own"), tensors(tmp_path / "again"))
    assert {t.dtype for t in tensors(tmp_path / "up").values()} == {torch.bfloat16}


def test_shards_are_merged_without_another_change(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "cut", max_shard="100KB", metadata={})
    assert len(folder.weight_files(tmp_path / "cut")) > 2
    conversion.convert(tmp_path / "cut", tmp_path / "whole", to="native", metadata={"why": "test"})
    assert [f.name for f in folder.weight_files(tmp_path / "whole")] == ["model.safetensors"]
    assert equal(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert json.loads((tmp_path / "cut/config.json").read_text()) == json.loads((tmp_path / "whole/config.json").read_text())
    folder.verify(tmp_path / "whole")


@needs_golden
@pytest.mark.parametrize("name", ["qwen2", "internlm2", "phi3"])
def test_a_configuration_comes_back_from_upstreams(name: str):
    """All that ours holds; what upstream's has beside it are defaults of its classes."""
    values = json.loads((GOLDEN / name / "config.json").read_text())
    config = layouts.from_upstream_config(values, checkpoint.read_tokenizer(GOLDEN / name))
    written = conversion.upstream_config(config)
    assert layouts.from_upstream_config(written, checkpoint.read_tokenizer(GOLDEN / name)) == config
    for part in (written, written["vision_config"], written["llm_config"]):
        theirs = values if part is written else values["vision_config"] if part is written["vision_config"] else values["llm_config"]
        same_keys = [k for k in part.keys() & theirs.keys() if k not in ("vision_config", "llm_config", "tiny_sam2_config")]
        assert {k: part[k] for k in same_keys} == {k: theirs[k] for k in same_keys}


@needs_golden
def test_the_account_of_a_release_and_of_a_base():
    release = conversion.account(GOLDEN / "qwen2")
    assert (release.kind, release.problems, release.dtypes) == ("upstream", (), ("float32",))
    assert release.parameters == sum(t.numel() for t in tensors(GOLDEN / "qwen2").values())
    assert conversion.account(GOLDEN / "training_pth/base_internvl").kind == "InternVL base"
    assert conversion.account(GOLDEN / "training_pth/base_internvl").problems == ()


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


def test_a_target_with_something_else_in_it_is_refused(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    (tmp_path / "models/precious").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(ValueError, match=r"models holds precious, which no earlier conversion wrote; give another folder"):
        conversion.convert(tmp_path / "m", tmp_path / "models", to="native", metadata={})
    with pytest.raises(ValueError, match=r"file is a file"):
        conversion.convert(tmp_path / "m", tmp_path / "file", to="native", metadata={})
    for _ in range(2):  # into nothing, and over what was written
        conversion.convert(tmp_path / "m", tmp_path / "other", to="native", metadata={})
    (tmp_path / "other/notes.txt").touch()
    with pytest.raises(ValueError, match=r"other holds notes\.txt"):
        conversion.convert(tmp_path / "m", tmp_path / "other", to="native", metadata={})
    assert {f.name for f in tmp_path.iterdir()} == {"m", "models", "file", "other", "other.partial"}
    assert (tmp_path / "models/precious").is_dir()


def test_a_file_that_was_cut_short_is_named(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    file = tmp_path / "m/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors .* cut short"):
        conversion.account(tmp_path / "m")


def test_other_families_are_refused_by_name(tmp_path: Path):
    for model_type, said in (("sa2va_qwen2_5_vl", "built on qwen"), ("sa2va_llava", "built on llava"), ("bert", "known are")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ValueError, match=said):
            conversion.account(tmp_path)


@needs_golden
def test_a_base_alone_is_no_model(tmp_path: Path):
    with pytest.raises(ValueError, match="half of a Sa2VA"):
        conversion.convert(GOLDEN / "training_pth/base_internvl", tmp_path / "out", to="native", metadata={})


# Upstream's training states

PAIR = GOLDEN / "training_pth"


def trained(state: Path, **changes: float) -> Sa2VA:
    return conversion.from_training_state(state, internvl=PAIR / "base_internvl", sam2=PAIR / "base_sam2", template="qwen_chat", **changes)


@needs_golden
@pytest.mark.parametrize("written", ["safetensors", "state_dict", "whole", "saved modules"])
def test_a_training_state_on_its_bases_is_the_merged_release(tmp_path: Path, written: str):
    """Of the trained tensors alone, as .safetensors and .pth; of a whole merged model; with the infixes of PEFT's saved modules."""
    state = load_file(PAIR / "training_state_dict.safetensors")
    expected = checkpoint.load(PAIR / "merged_hf")
    if written == "whole":
        merged = load_file(PAIR / "merged_hf/model.safetensors")
        state = {
            ("mllm.model." + k if k.startswith(("vision_model", "mlp1", "language_model")) else k).replace("g_weight", "gamma"): v
            for k, v in merged.items()
        }
    if written == "saved modules":
        state = {k.replace("embed_tokens.weight", "embed_tokens.modules_to_save.default.weight"): v for k, v in state.items()}
        state |= {k.replace("modules_to_save.default", "original_module"): v + 1 for k, v in state.items() if "modules_to_save" in k}
    file = tmp_path / "iter_1.pth"
    if written == "safetensors":
        file = PAIR / "training_state_dict.safetensors"
    else:
        torch.save({"state_dict": state, "meta": {"iter": 1}}, file)
    model = trained(file)
    base = checkpoint.import_base(PAIR / "base_internvl", PAIR / "base_sam2", "qwen_chat").sam2
    expected.sam2.original_mask_decoder, expected.sam2.config = base.original_mask_decoder, base.config
    assert model.config == replace(expected.config, grounding=base.config)
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=1e-6), name


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
        ValueError, match=r"2 unexpected: LoRA of language_model\.model\.layers\.1\.mlp\.up_proj\.weight, mllm\.model\.mlp9\.weight; 1 mis"
    ) as told:
        trained(tmp_path / "bad.safetensors")
    assert "text_hidden_fcs.0.bias (2,) for (64,)" in str(told.value)


@needs_golden
def test_no_pickled_code_of_a_training_state_is_run(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("ran",))

    torch.save({"state_dict": {"x": Evil()}}, tmp_path / "evil.pth")
    with pytest.raises(Exception, match=r"(?i)weights_only|unsupported"):
        trained(tmp_path / "evil.pth")
