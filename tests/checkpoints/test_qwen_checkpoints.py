"""Sa2VA on Qwen-VL as files: releases both ways, published sizes, bases from the hub's layout, and what is
wrong with them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ans_core.checkpoints import bases, checkpoint, conversion, layouts, published
from ans_core.inference.sa2va import Sa2VA
from tests.golden import GOLDEN, needs_golden

KINDS = ("qwen3_vl", "qwen2_5_vl")


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("kind", KINDS)
def test_a_release_comes_back_with_the_same_bytes(tmp_path: Path, kind: str):
    release = GOLDEN / kind
    told = conversion.account(release)
    assert (told.kind, told.problems) == ("upstream", ())
    conversion.convert(release, tmp_path / "native", to="native", max_shard="500KB", metadata={})
    conversion.convert(tmp_path / "native", tmp_path / "back", to="upstream", metadata={})
    assert (tmp_path / "back/model.safetensors").read_bytes() == (release / "model.safetensors").read_bytes()
    own, back = Sa2VA.from_pretrained(tmp_path / "native"), checkpoint.load(tmp_path / "back")
    assert own.config.kind == kind
    assert own.config == back.config == checkpoint.load(release).config
    assert all(
        torch.equal(a, b) for a, b in zip(own.state_dict().values(), back.state_dict().values(), strict=True)
    )


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_made_of_ours_has_the_processor_files_that_upstreams_code_asks_for(
    tmp_path: Path, kind: str
):
    """Against a release's: the same classes, colours and sizes; the limits of pixels are the model's own."""
    conversion.convert(GOLDEN / kind, tmp_path / "native", to="native", metadata={})
    conversion.convert(tmp_path / "native", tmp_path / "up", to="upstream", metadata={})
    limits = json.loads((GOLDEN / kind / "config.json").read_text())["tiny_predict_forward"]
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        theirs, written = (
            json.loads((folder / name).read_text()) for folder in (GOLDEN / kind, tmp_path / "up")
        )
        assert written.pop("size") == {
            "shortest_edge": limits["min_pixels"],
            "longest_edge": limits["max_pixels"],
        }
        assert written == {key: theirs[key] for key in written}
        assert {
            "processor_class",
            "image_mean",
            "image_std",
            "patch_size",
            "merge_size",
            "temporal_patch_size",
        } < written.keys()
    assert checkpoint.load(tmp_path / "up").config == checkpoint.load(tmp_path / "native").config


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("name", ["qwen3-2b", "qwen3-4b", "qwen25-3b", "qwen25-7b"])
def test_published_sizes_have_upstreams_keys_shapes_and_parameter_counts(name: str):
    model, key = (
        published.build_meta(f"sa2va-{name}"),
        name.replace("qwen3-", "qwen3_vl_").replace("qwen25-", "qwen2_5_vl_"),
    )
    expected = json.loads((GOLDEN / "keys/refkeys_qwen.json").read_text())[key]
    written = {
        k: list(t.shape) for k, t in layouts.to_upstream(model.state_dict(), layouts.layout_of(model.config))
    }
    assert {k: shape for k, shape in written.items() if not k.startswith("grounding_encoder.")} == expected
    counts = json.loads((GOLDEN / "keys/parameter_counts_qwen.json").read_text())[key]
    assert (len(written), sum(t.numel() for t in model.state_dict().values())) == (
        counts["n_keys"],
        counts["total"],
    )


def as_base(source: Path, target: Path, kind: str, *, old_names: bool) -> dict[str, Tensor]:
    """Turn a release into the repository it was built from: other names, a padded vocabulary and, with the
    new names, a tied head."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".txt", ".jinja") and file.name not in (
            "manifest.json",
            "predict_forward.json",
            "resize_cases.json",
        ):
            shutil.copyfile(file, target / file.name)
    state = {
        key.removeprefix("model."): t
        for key, t in load_file(source / "model.safetensors").items()
        if key.startswith("model.")
    }
    for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
        state[name] = torch.cat([state[name], torch.full((9, state[name].shape[1]), 7.0)])
    config = json.loads((source / "config.json").read_text()) | {
        "model_type": kind,
        "tie_word_embeddings": not old_names,
    }
    config["text_config"]["vocab_size"] = len(state["lm_head.weight"])
    stored = dict(state)
    if old_names:
        stored = {
            k.replace("model.visual.", "visual.").replace("model.language_model.", "model."): t
            for k, t in state.items()
        }
        config = config.pop("text_config") | config
        config["vocab_size"] = len(state["lm_head.weight"])
    else:
        del stored["lm_head.weight"]
    save_file(stored, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return state


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize(("kind", "old_names"), [("qwen3_vl", False), ("qwen2_5_vl", True)])
def test_a_base_joins_qwen_and_sam2_and_loses_its_padding(tmp_path: Path, kind: str, old_names: bool):
    """The release's own five tokens are in its tokenizer, so none is added: words beyond it are padding."""
    given = as_base(GOLDEN / kind, tmp_path / "base", kind, old_names=old_names)
    assert conversion.account(tmp_path / "base").problems == ()
    with pytest.raises(
        ValueError, match=rf"model_type '{kind}' is no Sa2VA .* is imported together with SAM2"
    ):
        checkpoint.load(tmp_path / "base")
    model = bases.import_base(tmp_path / "base", GOLDEN / "training_pth/base_sam2", "qwen_chat", seed=3)
    words = len(model.tokenizer)
    embedding = given["model.language_model.embed_tokens.weight"]
    head = given["lm_head.weight"] if old_names else embedding
    assert torch.equal(model.vlm.get_input_embeddings().weight, embedding[:words])
    assert torch.equal(model.vlm.lm_head.weight, head[:words])
    assert torch.equal(model.backbone.vision_tower.merger.state_dict()[name := next(iter(model.backbone.vision_tower.merger.state_dict()))],
                       given[f"model.visual.merger.{name}"])  # fmt: skip
    assert model.sam2.config.original_decoder


@pytest.mark.slow
@needs_golden
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(
        name: str, file: str, change: dict[str, object], *, text: dict[str, object] | None = None
    ) -> Path:
        shutil.copytree(GOLDEN / "qwen3_vl", folder := tmp_path / name)
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755)
        values = json.loads((folder / file).read_text()) | change
        values["text_config"] = values.get("text_config", {}) | (text or {})
        (folder / file).write_text(json.dumps(values))
        return folder

    llava = broken(
        "llava",
        "config.json",
        {"vision_config": {"model_type": "clip_vision_model"}},
        text={"model_type": "llama"},
    )
    with pytest.raises(
        ValueError,
        match=r"config\.json: it is built on clip_vision_model, llama; only Sa2VAs on InternVL and Qwen-VL",
    ):
        Sa2VA.from_pretrained(llava)
    sam3 = broken("sam3", "config.json", {})
    state = load_file(sam3 / "model.safetensors")
    save_file(
        {k.replace("image_encoder", "backbone"): t for k, t in state.items()}, sam3 / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"its grounding encoder is no SAM2 .* releases on SAM3 are not read"
    ):
        Sa2VA.from_pretrained(sam3)
    processor = broken("processor", "preprocessor_config.json", {"patch_size": 14})
    with pytest.raises(
        ValueError, match=r"preprocessor_config\.json: 'patch_size' is 14, but the weights' .*'patch_size' 16"
    ):
        Sa2VA.from_pretrained(processor)
    colours = broken("colours", "preprocessor_config.json", {"image_mean": [0.485, 0.456, 0.406]})
    with pytest.raises(
        ValueError,
        match=r"preprocessor_config\.json: 'image_mean' is \[0\.485, .*, but qwen3_vl takes \[0\.5,",
    ):
        Sa2VA.from_pretrained(colours)
    worded = broken("worded", "config.json", {}, text={"hidden_size": "64"})
    with pytest.raises(
        ValueError, match=r"worded: Validation error for field 'hidden_size': .*expected int, got str"
    ):
        Sa2VA.from_pretrained(worded)
    sizes = broken("sizes", "config.json", {}, text={"intermediate_size": 96})
    with pytest.raises(
        ValueError, match=r"12 mis-shaped: .*mlp\.down_proj\.weight \(64, 112\) for \(64, 96\)"
    ):
        Sa2VA.from_pretrained(sizes)
    rope = broken("rope", "config.json", {}, text={"rope_scaling": None})
    with pytest.raises(
        ValueError, match=r"config\.json: the text model has no 'rope_theta' or no 'mrope_section'"
    ):
        Sa2VA.from_pretrained(rope)
    for name, token in (("mute", "[SEG]"), ("unpointed", "<vp>")):
        folder = broken(name, "tokenizer_config.json", {})
        table = json.loads((folder / "tokenizer.json").read_text())
        table["added_tokens"] = [t for t in table["added_tokens"] if t["content"] != token]
        (folder / "tokenizer.json").write_text(json.dumps(table))
        for file in ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
            (folder / file).write_text((folder / file).read_text().replace(f'"{token}"', '"[OTHER]"'))
        with pytest.raises(
            ValueError,
            match=rf"{name}: the tokenizer splits '{re.escape(token)}' into \d+ tokens.*; copy the tokenizer's files",
        ):
            Sa2VA.from_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):  # as the message says
            shutil.copy(GOLDEN / "qwen3_vl" / file, folder)
        Sa2VA.from_pretrained(folder)
    monkeypatch.setattr(transformers, "Qwen3VLConfig", None)  # as in an older version
    with pytest.raises(
        ValueError, match=r"transformers \S+ has no Qwen3VLConfig; install that of constraints\.txt"
    ):
        Sa2VA.from_pretrained(GOLDEN / "qwen3_vl")


@pytest.mark.slow
@needs_golden
def test_a_training_state_with_lora_lies_on_its_bases(tmp_path: Path):
    """W + 2 B A where upstream's recipe trains LoRA, the state's own tensors where it trains whole; the
    vision tower stays the base's."""
    as_base(GOLDEN / "qwen3_vl", tmp_path / "base", "qwen3_vl", old_names=False)
    sam2 = GOLDEN / "training_pth/base_sam2"
    model = bases.import_base(tmp_path / "base", sam2, "qwen_chat")
    generator, state = torch.Generator().manual_seed(0), {}
    release = dict(layouts.to_upstream({k: t for k, t in model.state_dict().items() if "original" not in k},
                                       layouts.Layout(text_model="qwen3_vl")))  # fmt: skip
    inner = "mllm.model.base_model.model."
    for key, tensor in release.items():
        if key.startswith("model.model.language_model.layers.") and tensor.ndim == 2:
            name = inner + key.removeprefix("model.").removesuffix(".weight")
            state[f"{name}.lora_A.default.weight"] = torch.randn(2, tensor.shape[1], generator=generator)
            state[f"{name}.lora_B.default.weight"] = torch.randn(tensor.shape[0], 2, generator=generator)
        elif key in ("model.lm_head.weight", "model.model.language_model.embed_tokens.weight"):
            name = inner + key.removeprefix("model.").removesuffix("weight")
            state[f"{name}modules_to_save.default.weight"], state[f"{name}original_module.weight"] = (
                tensor + 1,
                tensor,
            )
        elif key.startswith(("text_hidden_fcs.", f"{layouts.UP_SAM}.sam_mask_decoder.")):
            state[key] = tensor + 1
    torch.save({"state_dict": state}, tmp_path / "iter_10.pth")
    merged = conversion.from_training_state(
        tmp_path / "iter_10.pth", internvl=tmp_path / "base", sam2=sam2, template="qwen_chat"
    )
    before, after = model.state_dict(), merged.state_dict()
    name = "model.language_model.layers.1.mlp.down_proj"
    change = 2 * state[f"{inner}{name}.lora_B.default.weight"] @ state[f"{inner}{name}.lora_A.default.weight"]
    assert torch.allclose(
        after[f"qwen3_vl.{name}.weight"], before[f"qwen3_vl.{name}.weight"] + change, atol=1e-5
    )
    for whole in ("qwen3_vl.lm_head.weight", "text_hidden_fcs.0.bias"):
        assert torch.equal(after[whole], before[whole] + 1)
    assert all(torch.equal(after[k], before[k]) for k in before if "visual" in k or "layernorm" in k)
    del state[f"{inner}{name}.lora_B.default.weight"]
    torch.save({"state_dict": state}, tmp_path / "iter_11.pth")
    with pytest.raises(
        ValueError, match=r"1 missing: model\.model\.language_model\.layers\.1\.mlp\.down_proj\.lora_B"
    ):
        conversion.from_training_state(
            tmp_path / "iter_11.pth", internvl=tmp_path / "base", sam2=sam2, template="qwen_chat"
        )
