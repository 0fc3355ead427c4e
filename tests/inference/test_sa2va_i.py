"""Video mode sa2va-i: masks of the seen frames prompt SAM2 as it was before Sa2VA's training."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ans_core.checkpoints import checkpoint, conversion
from ans_core.inference.options import PredictOptions
from ans_core.inference.sa2va import Sa2VA
from ans_core.inference.video import track
from ans_core.model.masks import upsample
from ans_core.model.network import Network
from ans_core.pictures import transforms
from tests import tiny
from tests.checkpoints.test_conversion import equal, tensors
from tests.golden import GOLDEN, arrays, error, needs_golden
from tests.model.test_parity import clip, to_image_size
from tests.tracks import propagated


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint as kumuji/Sa2VA-i writes it: the trained decoder renamed, SAM2's own under the
    old name."""
    folder = tmp_path_factory.mktemp("released") / "sa2va_i"
    shutil.copytree(GOLDEN / "qwen2", folder)
    state = load_file(folder / "model.safetensors")
    trained = {k.replace(".sam_mask_decoder.", ".sam_mask_decoder_modified."): v for k, v in state.items()}
    save_file(
        trained | load_file(GOLDEN / "sa2va_i/sam_mask_decoder_original.safetensors"),
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.slow
@needs_golden
def test_masks_through_a_clip_equal_upstreams(released: Path):
    model, pixels, outputs = (
        Sa2VA.from_pretrained(released),
        arrays("qwen2/inputs"),
        arrays("sa2va_i/outputs"),
    )
    model.config = dataclasses.replace(model.config, video_frames=3)
    mode = model.video_mode("auto")
    seen = model.seen_frames(8, mode)
    assert (mode, seen) == ("sa2va-i", outputs["sample_idx"].tolist())
    features = model.sam2.encode(clip(pixels, 8))
    embedding = pixels["sam_language_embd"][:1]
    first = model.sam2.decode(features, torch.tensor(seen), embedding.expand(len(seen), -1)).logits
    assert error(first[:, None], outputs["init_low_res"]) < 1e-5
    masks = F.interpolate(first[None], size=(150, 190), mode="bilinear") > 0
    assert torch.equal(masks[0], outputs["init_masks_150x190"])
    with model.sam2.original():
        low = propagated(model.sam2, features, model.sam2.mask_prompts(masks, seen), 1)[0]
    assert error(to_image_size(low[:, None])[..., ::4, ::4], outputs["propagated_logits_ds4"]) < 1e-4
    final = [torch.from_numpy(upsample(z, size=model.sam2.image_size, height=150, width=190)) for z in low]
    assert torch.equal(torch.stack(final), outputs["final_masks_150x190"])


@pytest.mark.slow
@needs_golden
def test_the_trained_decoder_draws_and_the_original_one_is_back_in_its_place(released: Path):
    model, plain = Sa2VA.from_pretrained(released), Sa2VA.from_pretrained(GOLDEN / "qwen2")
    trained = dict(model.sam2.sam_mask_decoder.named_parameters())
    assert all(torch.equal(p, trained[n]) for n, p in plain.sam2.sam_mask_decoder.named_parameters())
    with model.sam2.original():
        assert not torch.equal(
            model.sam2.sam_mask_decoder.conv_s0.weight, plain.sam2.sam_mask_decoder.conv_s0.weight
        )
    assert model.sam2.sam_mask_decoder.conv_s0.weight is trained["conv_s0.weight"]
    assert not model.sam2.blank_absent


def test_seen_frames_keep_the_masks_that_they_have_as_pictures(own_model: Network):
    """Two frames seen of four: what the trained decoder draws on these alone is what the clip shows there. Of
    the others the original decoder decides, which is made to say here that nothing is there."""
    own_model.keep_original_decoder()
    own_model.sam2.original_mask_decoder.pred_obj_score_head.layers[-1].bias -= 1e4
    pictures = [transforms.open_image(f) for f in tiny.clip(3).frames]
    embeddings = (
        torch.randn(2, own_model.config.grounding.width, generator=torch.Generator().manual_seed(1)) * 3
    )
    through = track(own_model, pictures, embeddings, PredictOptions(mode="sa2va-i"))
    seen = own_model.seen_frames(4, "sa2va-i")
    pixels = transforms.normalise([pictures[i] for i in seen], size=own_model.sam2.image_size)
    frames = torch.tensor([0, 1, 0, 1])
    alone = own_model.sam2.decode(
        own_model.sam2.encode(pixels), frames, embeddings.repeat_interleave(2, dim=0)
    ).logits.view(2, 2, 16, 16)
    assert 0.05 < (alone > 0).float().mean() < 0.95
    assert ((through[:, seen] > 0) == (alone > 0)).float().mean() > 0.97
    rest = [i for i in range(4) if i not in seen]
    assert (through[:, rest] == -1024).all()
    assert (track(own_model, pictures, embeddings, PredictOptions())[:, rest] > -1024).all()


def test_a_model_that_keeps_the_original_decoder_is_saved_with_it(tmp_path: Path, own_model: Network):
    own_model.keep_original_decoder()
    own_model.sam2.sam_mask_decoder.conv_s0.weight += 1
    checkpoint.save(own_model, tmp_path / "m", metadata={})
    again = Sa2VA.from_pretrained(tmp_path / "m")
    assert again.config == own_model.config
    assert again.video_mode("auto") == "sa2va-i"
    assert again.video_mode("sa2va") == "sa2va"
    difference = again.sam2.sam_mask_decoder.conv_s0.weight - again.sam2.original_mask_decoder.conv_s0.weight
    assert torch.allclose(difference, torch.ones_like(difference))


def test_the_mode_that_needs_the_original_decoder_is_refused_without_it(tiny_model: Network):
    assert tiny_model.video_mode("auto") == "sa2va"
    with pytest.raises(ValueError, match=r"--sam2 sam2_hiera_large\.pt"):
        tiny_model.video_mode("sa2va-i")


# Conversion


@pytest.fixture
def sam2_file(tmp_path: Path) -> Path:
    """As SAM2 is published, with nothing but its mask decoder."""
    prefix = "grounding_encoder.sam2_model."
    state = load_file(GOLDEN / "sa2va_i/sam_mask_decoder_original.safetensors")
    torch.save(
        {"model": {k.removeprefix(prefix): v for k, v in state.items()}}, tmp_path / "sam2_hiera_large.pt"
    )
    return tmp_path / "sam2_hiera_large.pt"


@pytest.mark.slow
@needs_golden
def test_a_release_with_two_decoders_comes_back_byte_for_byte(tmp_path: Path, released: Path):
    told = conversion.account(released)
    assert (told.kind, told.problems) == ("sa2va-i", ())
    conversion.convert(released, tmp_path / "ours", to="native", metadata={})
    assert conversion.account(tmp_path / "ours").kind == "native"
    assert Sa2VA.from_pretrained(tmp_path / "ours").video_mode("auto") == "sa2va-i"
    conversion.convert(tmp_path / "ours", tmp_path / "back", to="sa2va-i", metadata={})
    assert equal(tensors(tmp_path / "back"), tensors(released))


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("to", ["native", "sa2va-i"])
def test_the_original_decoder_is_added_from_sam2s_own_file(
    tmp_path: Path, released: Path, sam2_file: Path, to: conversion.Kind
):
    conversion.convert(GOLDEN / "qwen2", tmp_path / "out", to=to, sam2=sam2_file, metadata={})
    model, expected = Sa2VA.from_pretrained(tmp_path / "out"), Sa2VA.from_pretrained(released)
    assert model.config == expected.config
    assert all(torch.equal(p, expected.state_dict()[n]) for n, p in model.state_dict().items())


@pytest.mark.slow
@needs_golden
def test_upstreams_layout_leaves_the_original_decoder_out(tmp_path: Path, released: Path):
    conversion.convert(released, tmp_path / "out", to="upstream", metadata={})
    assert equal(tensors(tmp_path / "out"), tensors(GOLDEN / "qwen2"))


@pytest.mark.slow
@needs_golden
def test_decoders_that_are_missing_double_or_of_other_sizes_are_refused(
    tmp_path: Path, released: Path, sam2_file: Path
):
    with pytest.raises(ValueError, match=r"one mask decoder; sa2va-i needs SAM2's original one too: --sam2"):
        conversion.convert(GOLDEN / "qwen2", tmp_path / "out", to="sa2va-i", metadata={})
    with pytest.raises(ValueError, match="holds an original mask decoder already"):
        conversion.convert(released, tmp_path / "out", to="native", sam2=sam2_file, metadata={})
    with pytest.raises(ValueError, match="--to native or --to sa2va-i"):
        conversion.convert(GOLDEN / "qwen2", tmp_path / "out", to="upstream", sam2=sam2_file, metadata={})
    other = GOLDEN / "training_pth/base_sam2"
    with pytest.raises(ValueError, match=r"the mask decoder of .* does not fit: \d+ mis-shaped: "):
        conversion.convert(GOLDEN / "qwen2", tmp_path / "out", to="native", sam2=other, metadata={})
    assert not (tmp_path / "out").exists()
