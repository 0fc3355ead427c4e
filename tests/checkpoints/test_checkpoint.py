from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sam2.modeling.sam2_utils import LayerNorm2d
from torch import nn

from ans_core import precision
from ans_core.checkpoints import bases, checkpoint, conversion, folder, layouts, published
from ans_core.hub import download
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import Network
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from ans_core.written import atomic_folder
from tests.golden import GOLDEN, needs_golden
from tests.tracks import track


@lru_cache
def tiny() -> Network:
    tokenizer = build_tokenizer(["a red circle left of a blue square"] * 10, vocabulary=300)
    config = tiny_config(
        vision={"image_size": 32, "patch_size": 8, "hidden": 16, "layers": 1, "heads": 2, "mlp": 32},
        language={"hidden": 32, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 32},
        grounding=GroundingConfig(
            image_size=64,
            embed=8,
            heads=1,
            stages=(1, 1, 2, 1),
            global_blocks=(3,),
            windows=(4, 2, 4, 2),
            width=32,
            memory_width=16,
        ),
        tokenizer=tokenizer,
        template="qwen_chat",
        video_frames=3,
    )
    return build_tiny(config, tokenizer, seed=0)


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(left[k], right[k]) and left[k].dtype == right[k].dtype for k in left
    )


# Our folder


def test_a_saved_model_loads_with_the_same_bits_config_and_tokenizer(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={"stage": "base"})
    again = Sa2VA.from_pretrained(tmp_path / "m")
    assert same(tiny(), again)
    assert again.config == tiny().config
    assert again.tokenizer.encode("a red [SEG]") == tiny().tokenizer.encode("a red [SEG]")
    assert again.seg_token_id == tiny().seg_token_id
    assert not again.training
    assert folder.read_manifest(tmp_path / "m")["metadata"] == {"stage": "base"}
    assert [f.name for f in tmp_path.iterdir()] == ["m"]


def test_a_loaded_model_computes_what_the_saved_one_does(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    again, pixels = (
        checkpoint.load(tmp_path / "m"),
        torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)),
    )
    prompts = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    model = tiny().eval()
    with torch.no_grad():
        torch.testing.assert_close(  # the last bits depend on where in memory a weight begins
            track(model.sam2, model.sam2.encode(pixels), prompts, conditioning=[0]),
            track(again.sam2, again.sam2.encode(pixels), prompts, conditioning=[0]),
            rtol=1e-3,
            atol=1e-4,
        )
        ids = torch.tensor([model.tokenizer.encode("a red circle")])
        torch.testing.assert_close(
            model.internvl(input_ids=ids).logits, again.internvl(input_ids=ids).logits, rtol=1e-3, atol=1e-4
        )


def test_shards_load_as_one_file_does_and_a_missing_shard_is_named(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", max_shard="300KB", metadata={})
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 2
    assert same(tiny(), checkpoint.load(tmp_path / "m"))
    shards[1].unlink()
    with pytest.raises(ValueError, match=rf"{shards[1].name} is missing"):
        checkpoint.load(tmp_path / "m")


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    name = "text_hidden_fcs.0.bias"
    save_file({name: tiny().state_dict()[name]}, tmp_path / "m/old.safetensors")
    said = f"m/model.safetensors and .*m/old.safetensors both hold {name}"
    with pytest.raises(ValueError, match=said):
        checkpoint.load(tmp_path / "m")
    with pytest.raises(ValueError, match=said):
        conversion.Reader(tmp_path / "m")


def test_in_the_hubs_cache_only_files_that_loading_needs_can_be_missing(tmp_path: Path):
    cached = tmp_path / "models--a--b/snapshots/0123"
    cached.mkdir(parents=True)
    for name in ("LICENSE", "chat_template.jinja", "config.json"):
        (cached / name).write_text(name)
    folder.write_manifest(cached, {})
    (cached / "LICENSE").unlink()
    folder.verify(cached)
    shutil.copytree(cached, tmp_path / "copy")
    with pytest.raises(ValueError, match="LICENSE is missing"):
        folder.verify(tmp_path / "copy")
    (cached / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"chat_template\.jinja is missing"):
        folder.verify(cached)


def test_loading_in_another_dtype_casts_every_tensor_but_sam2s_norms(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    model = checkpoint.load(tmp_path / "m", dtype=torch.bfloat16)
    norms = {
        id(p)
        for m in model.sam2.modules()
        if isinstance(m, (nn.LayerNorm, LayerNorm2d))
        for p in m.parameters()
    }
    assert {p.dtype for p in model.parameters() if id(p) not in norms} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if id(p) in norms} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float17"}, "dtype 'float17' holds no weights; use float32, bfloat16, float16"),
        ({"dtype": torch.int8}, r"dtype torch\.int8 holds no weights"),
        ({"dtype": "Tensor"}, "dtype 'Tensor' holds no weights"),
        ({"device_map": "nowhere"}, "device_map 'nowhere' is no device"),
        ({"device_map": "cuda:99"}, r"device_map 'cuda:99': torch .* sees \d+ GPUs here"),
        ({"device_map": "meta"}, 'device_map \'meta\': only "cpu" and "cuda" are supported'),
        ({"device_map": {"": "cpu"}}, "names several devices; a Sa2VA lies on one"),
        ({"attn_implementation": "fast"}, "fast"),
    ],
)
def test_a_wrong_dtype_or_device_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users have no such check of types
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    with pytest.raises(ValueError, match=message):
        Sa2VA.from_pretrained(tmp_path / "m", **changes)


PARTS = {
    "vision": "internvl.model.vision_tower",
    "projector": "internvl.model.multi_modal_projector",
    "language": "internvl.model.language_model",
    "head": "internvl.lm_head",
    "seg": "text_hidden_fcs",
    "sam2": "sam2",
}


@pytest.mark.slow
@pytest.mark.usefixtures("native_bf16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "halved", [["language", "head"], ["projector"], ["sam2", "seg"], ["vision"], "some tensors"]
)
def test_any_mixture_with_a_half_precision_loads_and_answers(
    tmp_path: Path, halved: list[str] | str, dtype: torch.dtype
):
    model = copy.deepcopy(tiny())
    with torch.no_grad():
        model.internvl.lm_head.weight[model.seg_token_id] *= 3
    if isinstance(halved, list):
        for part in halved:
            model.get_submodule(PARTS[part]).to(dtype)
    else:
        for number, p in enumerate(model.parameters()):
            p.data = p.data.to(dtype if number * 7 % 5 < 2 else torch.float32)
    checkpoint.save(model, tmp_path / "m", metadata={})
    loaded = Sa2VA.from_pretrained(tmp_path / "m")
    assert loaded.dtype == dtype
    assert {p.dtype for p in loaded.parameters()} == {dtype, torch.float32}
    frames = [np.full((40, 50, 3), 60 * shade, np.uint8) for shade in range(1, 5)]
    with torch.no_grad():
        exact = copy.deepcopy(loaded).float()
        asked = {"text": "<image>What is region1?", "mask_prompts": [np.eye(40, 50)], "max_tokens": 4}
        for shown in ({"image": frames[0]}, {"video": frames}):
            answer, expected = loaded.predict(**asked, **shown), exact.predict(**asked, **shown)
            if answer.text == expected.text and len(expected.mask_logits):
                assert (
                    answer.seg_embeddings - expected.seg_embeddings
                ).norm() < 0.1 * expected.seg_embeddings.norm()


@pytest.mark.slow
@pytest.mark.usefixtures("native_bf16")
@pytest.mark.parametrize(
    ("dtypes", "listed"),
    [((torch.bfloat16, torch.float16), "bfloat16, float16, float32"), ((torch.float64,), "float32, float64")],
)
def test_weights_that_no_forward_pass_takes_together_are_refused_unless_cast(
    tmp_path: Path, dtypes: tuple[torch.dtype], listed: str
):
    model = copy.deepcopy(tiny())
    for part, dtype in zip(("vision", "head"), dtypes, strict=False):
        model.get_submodule(PARTS[part]).to(dtype)
    checkpoint.save(model, tmp_path / "m", metadata={})
    with pytest.raises(
        ValueError,
        match=f"holds weights in {listed}, which no forward pass takes together; load it in one: dtype",
    ):
        Sa2VA.from_pretrained(tmp_path / "m")
    assert Sa2VA.from_pretrained(tmp_path / "m", dtype="float32").dtype == torch.float32


@pytest.mark.slow
@pytest.mark.usefixtures("native_bf16")
def test_auto_takes_the_stored_dtype_and_a_device_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint.save(copy.deepcopy(tiny()).to(torch.bfloat16), tmp_path / "m", metadata={})
    model = Sa2VA.from_pretrained(tmp_path / "m", dtype="auto", device_map="auto")
    assert model.dtype == torch.bfloat16
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert Sa2VA.from_pretrained(tmp_path / "m", dtype="float32").dtype == torch.float32
    monkeypatch.setattr(precision, "cpu_times", lambda: {"fp32": 1.0, "bf16": 9.0})
    # bf16 would be emulated
    assert Sa2VA.from_pretrained(tmp_path / "m", device_map="cpu").dtype == torch.float32
    assert Sa2VA.from_pretrained(tmp_path / "m", dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_a_damaged_file_is_named(tmp_path: Path, harm: str):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    file = tmp_path / "m" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data if harm == "flip" else data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        checkpoint.load(tmp_path / "m")


def test_a_cut_file_without_manifest_is_named_too(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    (tmp_path / "m" / "manifest.json").unlink()
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        checkpoint.load(tmp_path / "m")


def test_missing_unexpected_and_misshaped_tensors_are_all_listed(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    (tmp_path / "m" / "manifest.json").unlink()
    file = tmp_path / "m" / "model.safetensors"
    state = load_file(file)
    del state["sam2.no_mem_embed"]
    state["stray"] = torch.zeros(1)
    state["text_hidden_fcs.0.bias"] = torch.zeros(31)
    save_file(state, file)
    with pytest.raises(ValueError, match="does not fit") as caught:
        checkpoint.load(tmp_path / "m")
    message = str(caught.value)
    assert "1 missing: sam2.no_mem_embed" in message
    assert "1 unexpected: stray" in message
    assert "1 mis-shaped: text_hidden_fcs.0.bias (31,) for (32,)" in message


def test_of_many_tensors_ten_are_named_and_the_others_counted():
    """25 wanted, of which two are there."""
    found = {"t03": torch.zeros(1), "t07": torch.zeros(1)}
    (line,) = checkpoint.misfits({f"t{n:02d}": torch.Size((1,)) for n in range(25)}, found)
    assert line == "23 missing: t00, t01, t02, t04, t05, t06, t08, t09, t10, t11 and 13 more"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_weight_that_is_no_number_is_found_wherever_it_stands(dtype: torch.dtype, value: float):
    for size in (1, 7, 64, 1001):  # with and without a rest behind the processor's vectors
        for place in {0, size // 2, size - 1}:
            weights = torch.full((size,), 60000.0, dtype=dtype)  # their sum is too large for fp16
            assert checkpoint.is_finite(weights)
            weights[place] = value
            assert not checkpoint.is_finite(weights)
    assert checkpoint.is_finite(torch.zeros(0, dtype=dtype))


def with_weight(path: Path, name: str, value: float, dtype: torch.dtype = torch.float32) -> Path:
    """Save the tiny model with one weight of a tensor set to `value`."""
    model = copy.deepcopy(tiny()).to(dtype)
    model.get_parameter(name).data.view(-1)[-1] = value
    checkpoint.save(model, path, metadata={})
    return path


BROKEN = "internvl.model.language_model.layers.0.mlp.up_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_model_with_a_weight_that_is_no_number_is_refused_by_its_name(tmp_path: Path, value: float):
    folder = with_weight(tmp_path / "m", BROKEN, value)
    (problem,) = conversion.account(folder).problems
    said = re.escape(f"1 with weights that are NaN or infinite: {BROKEN} (")
    assert re.match(said, problem)
    divided = []
    for read in (
        lambda: checkpoint.load(folder),
        lambda: checkpoint.load(folder, dtype=torch.bfloat16),
        lambda: checkpoint.load(folder, divide=divided.append),
        lambda: conversion.convert(folder, tmp_path / "out", to="native", metadata={}),
        lambda: conversion.convert(folder, tmp_path / "out", to="upstream", metadata={}),
    ):
        with pytest.raises(ValueError, match=said):
            read()
    assert divided  # layer by layer
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_weight_that_is_too_large_for_the_asked_dtype_is_named(tmp_path: Path):
    folder = with_weight(tmp_path / "m", BROKEN, 70000.0)  # fp16 ends at 65504
    assert conversion.account(folder).problems == ()
    with pytest.raises(
        ValueError, match=re.escape(f"1 too large for float16: {BROKEN}; load it in bfloat16 or float32")
    ):
        Sa2VA.from_pretrained(folder, dtype="float16")
    # as the message says
    assert Sa2VA.from_pretrained(folder, dtype="bfloat16").get_parameter(BROKEN).max() > 65504


def test_a_folder_that_is_no_sa2va_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    (tmp_path / "tokenizer.json").write_text(tiny().tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model_type 'llava' is no Sa2VA"):
        checkpoint.load(tmp_path)


def test_another_family_is_refused_by_name(tmp_path: Path):
    for model_type, family in (("sa2va_sam3", "sam3"), ("sa2va_llava", "llava")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(
            ValueError,
            match=rf"model_type '{model_type}' .* built on {family}, and only those on InternVL and Qwen-VL are read",
        ):
            Sa2VA.from_pretrained(tmp_path)


def test_an_edited_file_is_told_with_what_to_do(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    file = tmp_path / "m/config.json"
    file.write_text(file.read_text().replace('"video_frames": 3', '"video_frames": 4'))
    with pytest.raises(
        ValueError,
        match=r"config\.json is damaged, or was edited: .* take the line of config\.json out of manifest\.json",
    ):
        checkpoint.load(tmp_path / "m")
    manifest = json.loads((tmp_path / "m/manifest.json").read_text())
    del manifest["sha256"]["config.json"]
    (tmp_path / "m/manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.load(tmp_path / "m").config.video_frames == 4


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", "3", "config.json is malformed"),
        ("config.json", "{", "config.json: not JSON"),
        ("manifest.json", "3", "manifest.json is malformed"),
        ("manifest.json", '{"sha256": 3}', "manifest.json is malformed"),
        ("tokenizer.json", "{}", "tokenizer.json has no 'model'"),
        ("tokenizer.json", "[", "tokenizer.json: not JSON"),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json has no 'weight_map'"),
        ("model.safetensors.index.json", "x", "model.safetensors.index.json: not JSON"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"x": 3}}',
            "model.safetensors.index.json is malformed",
        ),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, file: str, text: str, said: str):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    (tmp_path / "m/manifest.json").unlink()
    (tmp_path / "m" / file).write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        checkpoint.load(tmp_path / "m")


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upstream")
    checkpoint.save(tiny(), folder / "own", metadata={})
    conversion.convert(folder / "own", folder / "up", to="upstream", metadata={})
    (folder / "up/manifest.json").unlink()
    return folder / "up"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("template", None, "has no 'template'"),
        ("template", "vicuna", "no 'template' 'vicuna'; there are qwen_chat, internlm2_chat, phi3_chat"),
        ("vision_config", None, "has no 'vision_config'"),
        ("vision_config", 3, "'vision_config' is 3"),
        ("vision_config.patch_size", None, "has no 'patch_size'"),
        ("llm_config.rope_theta", None, "has no 'rope_theta'"),
        ("llm_config.use_sliding_window", True, "'sliding_window' 16"),
        ("downsample_ratio", None, "has no 'downsample_ratio'"),
        ("tiny_sam2_config.embed_dim", None, "has no 'embed_dim'"),
        ("tiny_sam2_config.mem_heads", 2, "SAM2's sizes hold ['mem_heads'], which would have no effect"),
        (
            "tiny_sam2_config.backbone_channel_list",
            [8, 4],
            "'backbone_channel_list' is [8, 4]; with 'embed_dim' 8 it is [64, 32, 16, 8]",
        ),
        ("select_layer", -2, "'select_layer' is -2; only -1"),
        ("ans", {"frames": 2}, "'ans' is {'frames': 2}; it holds nothing but video_frames, frame_choice"),
        ("ans", [2], "'ans' is [2]; it holds nothing but video_frames, frame_choice"),
        ("ans", {"video_frames": 0}, "0 frames of a clip; give a whole number from 1"),
        ("ans", {"frame_choice": "last"}, "frame choice 'last'; there are first, uniform"),
        ("ps_version", "v1", "'ps_version' is 'v1'; only 'v2'"),
    ],
)
def test_what_is_wrong_in_an_upstream_config_is_named(
    upstream: Path, tmp_path: Path, key: str, value: object, said: str
):
    shutil.copytree(upstream, tmp_path / "up")
    values = json.loads((upstream / "config.json").read_text())
    values["llm_config"]["sliding_window"] = 16
    change(values, key, value)
    (tmp_path / "up/config.json").write_text(json.dumps(values))
    for read in (checkpoint.load, conversion.account):
        with pytest.raises(ValueError, match=r"config\.json:? .*" + re.escape(said)):
            read(tmp_path / "up")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("template", None, "template"),
        ("template", "vicuna", "no 'template' 'vicuna'; there are qwen_chat, internlm2_chat, phi3_chat"),
        ("grounding", None, "has no 'grounding'"),
        ("video_frames", "3", "'3' frames of a clip; give a whole number from 1"),
        ("internvl.vision_config", None, "has no 'vision_config'"),
        ("internvl.text_config", 3, "'vision_config' and 'text_config' are to be the sizes"),
    ],
)
def test_what_is_wrong_in_our_config_is_named(tmp_path: Path, key: str, value: object, said: str):
    checkpoint.save(tiny(), tmp_path / "m", metadata={})
    (tmp_path / "m/manifest.json").unlink()
    values = json.loads((tmp_path / "m/config.json").read_text())
    change(values, key, value)
    (tmp_path / "m/config.json").write_text(json.dumps(values))
    for read in (checkpoint.load, conversion.account):
        with pytest.raises(ValueError, match=r"config\.json:? .*" + re.escape(said)):
            read(tmp_path / "m")


def change(values: dict[str, Any], key: str, value: object) -> None:
    """`key` with dots for what lies deeper; None takes it out."""
    *outer, last = key.split(".")
    for name in outer:
        values = values[name]
    if value is None:
        del values[last]
    else:
        values[last] = value


def test_a_checkpoint_that_does_not_fit_the_disk_is_refused_before_writing(tmp_path: Path):
    with pytest.raises(OSError, match=r"needs 1000000\.00 GB"), atomic_folder(tmp_path / "m", size=10**15):
        raise AssertionError("the body must not run")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_folder(tmp_path: Path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").touch()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "m", size=1) as partial:  # noqa: PT012
        (partial / "new").touch()
        raise RuntimeError
    assert [f.relative_to(tmp_path).as_posix() for f in sorted(tmp_path.rglob("*"))] == ["m", "m/old"]


def test_the_old_folder_goes_when_the_new_one_is_there_and_comes_back_after_a_kill_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def write(text: str) -> None:
        with atomic_folder(tmp_path / "m") as partial:
            (partial / "file").write_text(text)

    really_rename = Path.rename

    def rename(partial: Path, target: Path) -> None:
        if partial.name == ".m.partial":
            os._exit(9)
        really_rename(partial, target)

    write("old")
    if not (pid := os.fork()):
        with monkeypatch.context() as killed:
            killed.setattr(Path, "rename", rename)
            write("new")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "m"):
        raise RuntimeError
    assert [(file.name, file.read_text()) for file in (tmp_path / "m").iterdir()] == [("file", "old")]
    write("new")
    assert [(file.name, file.read_text()) for file in (tmp_path / "m").iterdir()] == [("file", "new")]
    assert [folder.name for folder in tmp_path.iterdir()] == ["m"]


def test_a_link_to_a_folder_stays_one(tmp_path: Path):
    for name in ("disk", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "there/m").symlink_to("../disk/m")
    for text in ("first", "second"):  # a link to nothing, and to a folder
        with atomic_folder(tmp_path / "there/m") as partial:
            (partial / "file").write_text(text)
        assert (tmp_path / "disk/m/file").read_text() == text
    assert (tmp_path / "there/m").is_symlink()
    assert {folder.name for folder in tmp_path.glob("*/*")} == {"m"}


def test_the_weights_hash_follows_the_tensors_alone(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "a", metadata={"x": 1})
    checkpoint.save(tiny(), tmp_path / "b", metadata={"x": 2})
    assert checkpoint.weights_hash(tmp_path / "a") == checkpoint.weights_hash(tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    assert checkpoint.weights_hash(tmp_path / "a") == checkpoint.weights_hash(tmp_path / "b")
    changed = checkpoint.load(tmp_path / "a")
    changed.text_hidden_fcs[0].bias.data += 1
    checkpoint.save(changed, tmp_path / "b", metadata={})
    assert checkpoint.weights_hash(tmp_path / "a") != checkpoint.weights_hash(tmp_path / "b")


def test_the_hash_of_the_configuration_follows_the_files_beside_the_tensors(tmp_path: Path):
    checkpoint.save(tiny(), tmp_path / "a", metadata={"x": 1})
    checkpoint.save(tiny(), tmp_path / "b", metadata={"x": 2})
    (tmp_path / "b" / download.VERIFIED).write_text("{}")  # the same model, fetched from the hub
    assert checkpoint.config_hash(tmp_path / "a") == checkpoint.config_hash(tmp_path / "b")
    changed = {"config.json", "tokenizer_config.json"}
    for name in changed:
        (tmp_path / "b" / name).write_text((tmp_path / "a" / name).read_text() + " ")
        assert checkpoint.config_hash(tmp_path / "a") != checkpoint.config_hash(tmp_path / "b")
        (tmp_path / "b" / name).write_text((tmp_path / "a" / name).read_text())


# Deltas


def test_a_delta_comes_back_and_refuses_another_base(tmp_path: Path):
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}
    checkpoint.save_delta(tensors, tmp_path / "d", base_hash="1" * 64, config={"rank": 4})
    back, config = checkpoint.load_delta(tmp_path / "d", base_hash="1" * 64)
    assert config == {"rank": 4}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[k], tensors[k]) and back[k].dtype == tensors[k].dtype for k in tensors)
    with pytest.raises(ValueError, match="was trained on the base 111111111111, not on 222222222222"):
        checkpoint.load_delta(tmp_path / "d", base_hash="2" * 64)
    file = tmp_path / "d" / "delta.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"delta\.safetensors is damaged"):
        checkpoint.load_delta(tmp_path / "d", base_hash="1" * 64)
    tensors["b"][1] = torch.nan
    checkpoint.save_delta(tensors, tmp_path / "nan", base_hash="1" * 64, config={})
    with pytest.raises(ValueError, match="1 with weights that are NaN or infinite: b "):
        checkpoint.load_delta(tmp_path / "nan", base_hash="1" * 64)


# Upstream's layout


def test_internlm2_packs_each_key_heads_queries_then_key_then_value():
    """2 key heads of width 1, 2 queries each: rows q0 q1 k0 v0 q2 q3 k1 v1."""
    layout = layouts.Layout(text_model="internlm2", queries_per_key=2, head_width=1)
    key = "language_model.model.layers.0.attention.wqkv.weight"
    packed = torch.tensor([[0], [1], [10], [20], [2], [3], [11], [21]])
    q, k, v = layouts.split(key, packed, layout)
    assert (q.flatten().tolist(), k.flatten().tolist(), v.flatten().tolist()) == (
        [0, 1, 2, 3],
        [10, 11],
        [20, 21],
    )
    assert torch.equal(layouts.join(key, [q, k, v], layout), packed)


def test_an_unknown_text_model_is_refused():
    with pytest.raises(ValueError, match="text model 'gemma' is not supported; qwen2, internlm2, phi3 are"):
        layouts.text_config({"model_type": "gemma"})


@needs_golden
@pytest.mark.parametrize("name", ["qwen2", "internlm2", "phi3", "training_pth/merged_hf"])
def test_upstream_to_native_and_back_is_equal_in_every_tensor(name: str):
    path = GOLDEN / name
    config = layouts.from_upstream_config(checkpoint.read_config(path), checkpoint.read_tokenizer(path))
    layout = layouts.layout_of(config)
    original = dict(folder.tensors(folder.weight_files(path)))
    native = dict(layouts.to_native(original.items(), layout))
    back = dict(layouts.to_upstream(native, layout))
    assert native.keys().isdisjoint(
        original.keys() - {k for k in original if k.startswith("text_hidden_fcs")}
    )
    assert back.keys() == original.keys()
    assert all(torch.equal(back[k], original[k]) for k in original)


@pytest.mark.slow
@needs_golden
def test_an_upstream_folder_saved_as_ours_loads_with_the_same_bits(tmp_path: Path):
    model = Sa2VA.from_pretrained(GOLDEN / "qwen2")
    checkpoint.save(model, tmp_path / "m", metadata={})
    assert same(model, checkpoint.load(tmp_path / "m"))


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize(("name", "billions"), [("1b", 1.164), ("4b", 3.942), ("8b", 8.318), ("26b", 25.778)])
def test_published_sizes_have_upstreams_keys_shapes_and_parameter_counts(name: str, billions: float):
    model = published.build_meta(f"sa2va-{name}")
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == billions
    assert all(p.is_meta for p in model.parameters())
    expected = json.loads((GOLDEN / "keys" / "refkeys.json").read_text())[name]
    state, layout = model.state_dict(), layouts.layout_of(model.config)
    assert {key: list(tensor.shape) for key, tensor in layouts.to_upstream(state, layout)} == expected
    upstream = ((key, torch.empty(shape, device="meta")) for key, shape in expected.items())
    assert {k: v.shape for k, v in layouts.to_native(upstream, layout)} == {
        k: v.shape for k, v in state.items()
    }


def test_published_special_tokens_have_their_published_ids():
    ids = published.special_token_ids(151679)
    assert (ids["<IMG_CONTEXT>"], ids["[SEG]"], ids["</vp>"]) == (151667, 151674, 151678)
    ids = published.special_token_ids(92558)
    assert (ids["<IMG_CONTEXT>"], ids["[SEG]"], ids["</vp>"]) == (92546, 92553, 92557)


@pytest.mark.slow
def test_a_published_sizes_tokenizer_reads_any_text():
    encoded = published.build_meta("sa2va-4b").tokenizer.encode("Sure, [SEG].<|end|>")
    assert encoded == [0, 0, 151674, 0, 1]


def test_an_unknown_published_size_names_the_known_ones():
    with pytest.raises(ValueError, match="no published size 'sa2va-2b'; there are sa2va-1b"):
        published.build_meta("sa2va-2b")


# Published bases


@pytest.mark.slow
@needs_golden
def test_a_base_joins_internvl_and_sam2_and_adds_the_tokens():
    pair = GOLDEN / "training_pth"
    model = bases.import_base(pair / "base_internvl", pair / "base_sam2", "qwen_chat", seed=3)
    whole = Sa2VA.from_pretrained(pair / "merged_hf")
    whole.sam2.sam_mask_decoder.load_state_dict(model.sam2.sam_mask_decoder.state_dict())
    whole.keep_original_decoder()  # a base keeps SAM2's own, which is its only one so far
    assert same(model.sam2, whole.sam2)
    assert model.config.as_dict() | {"internvl": None} == whole.config.as_dict() | {"internvl": None}
    assert (len(model.tokenizer), model.seg_token_id) == (275, 270)
    ours, merged = model.state_dict(), whole.state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in merged.items()}
    frozen = [k for k in ours if k.startswith("internvl.model.vision_tower")]
    assert len(frozen) == 40
    assert all(torch.equal(ours[k], merged[k]) for k in frozen)
    base = dict(folder.tensors([pair / "base_internvl" / "model.safetensors"]))
    assert torch.equal(ours["internvl.lm_head.weight"][:270], base["language_model.lm_head.weight"])
    assert 0.01 < ours["internvl.lm_head.weight"][270:].std() < 0.03
    again = bases.import_base(pair / "base_internvl", pair / "base_sam2", "qwen_chat", seed=3)
    other = bases.import_base(pair / "base_internvl", pair / "base_sam2", "qwen_chat", seed=4)
    assert same(model, again)
    assert not torch.equal(ours["text_hidden_fcs.0.weight"], other.state_dict()["text_hidden_fcs.0.weight"])


@pytest.mark.slow
@needs_golden
def test_a_base_with_trained_tensors_on_top_is_upstreams_merged_model():
    """W + alpha/r * B A for the text model's linears (alpha/r = 2), every other trained tensor as it is."""
    pair = GOLDEN / "training_pth"
    model = bases.import_base(pair / "base_internvl", pair / "base_sam2", "qwen_chat")
    layout = dataclasses.replace(layouts.layout_of(model.config), two_decoders=False)
    prefix = "language_model.base_model.model."
    trained = {
        k.removeprefix("mllm.model.").replace(prefix, "language_model."): v
        for k, v in load_file(pair / "training_state_dict.safetensors").items()
    }
    state = model.state_dict()
    for key, tensor in trained.items():
        if ".lora_A." in key:
            continue
        part, _, rank = key.partition(".lora_B.")
        name, *others = layouts.native_names(f"{part}.weight" if rank else key, layout)
        assert not others
        state[name].copy_(
            state[name] + 2 * tensor @ trained[key.replace("lora_B", "lora_A")] if rank else tensor
        )
    merged = Sa2VA.from_pretrained(pair / "merged_hf").state_dict()
    assert max(float((state[k] - merged[k]).abs().max()) for k in merged) < 1e-6


@pytest.mark.slow
@needs_golden
def test_sam2_is_read_from_its_published_pt_file_without_running_pickle_code(tmp_path: Path):
    pair = GOLDEN / "training_pth"
    state = load_file(pair / "base_sam2" / "model.safetensors")
    torch.save({"model": state}, tmp_path / "sam2_hiera_large.pt")
    (tmp_path / "tiny_sam2_config.json").write_bytes(
        (pair / "base_sam2" / "tiny_sam2_config.json").read_bytes()
    )
    one = bases.import_base(pair / "base_internvl", tmp_path / "sam2_hiera_large.pt", "qwen_chat")
    assert same(one, bases.import_base(pair / "base_internvl", pair / "base_sam2", "qwen_chat"))
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt is no SAM2 checkpoint: it has no entry 'model'"):
        bases.import_base(pair / "base_internvl", tmp_path / "other.pt", "qwen_chat")


@pytest.mark.slow
@needs_golden
def test_a_release_is_a_whole_base_and_takes_no_sam2():
    assert same(bases.import_base(GOLDEN / "qwen2", "", "qwen_chat"), Sa2VA.from_pretrained(GOLDEN / "qwen2"))
    with pytest.raises(ValueError, match="holds its own SAM2"):
        bases.import_base(GOLDEN / "qwen2", "facebook/sam2-hiera-large", "qwen_chat")


@pytest.mark.slow
def test_a_model_is_loaded_by_its_hub_id(tmp_path: Path):
    """From a cache as the hub's client lays it out, without a connection. The client reads its settings once,
    so it is a new process."""
    snapshot = tmp_path / "models--someone--tiny/snapshots/0123456789abcdef0123456789abcdef01234567"
    checkpoint.save(tiny(), snapshot, metadata={})
    (tmp_path / "models--someone--tiny/refs").mkdir()
    (tmp_path / "models--someone--tiny/refs/main").write_text(snapshot.name)
    script = """
from ans_core.model.network import Network
from ans_core.inference.sa2va import Sa2VA
print(sum(p.numel() for p in Sa2VA.from_pretrained("someone/tiny").parameters()))
try:
    Sa2VA.from_pretrained("someone/other")
except ValueError as error:
    print(error)
"""
    settings = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=settings, capture_output=True, text=True, check=True
    )
    size, said = ran.stdout.strip().split("\n", 1)
    assert int(size) == sum(p.numel() for p in tiny().parameters())
    assert said.startswith("no folder 'someone/other', and it can't be had from the hub (")


@pytest.mark.parametrize("name", ["/nowhere", "runs", "runs/tiny/model", "tests/nothing", ""])
def test_a_folder_that_is_not_there_is_not_taken_for_a_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)  # where no `runs` of one's own stands
    with pytest.raises(ValueError, match=f"no folder '{name}'; give a local folder or a hub id"):
        Sa2VA.from_pretrained(name)
