"""The SAM2 of a whole run, at each of its stages, in the stock package and in transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Sam2VideoModel

from ans_core.checkpoints import checkpoint, memory, sam2_export
from ans_core.checkpoints import sam2 as sam2_files
from ans_core.checkpoints.trained import rl_model, sft_model
from ans_core.inference.sa2va import Sa2VA
from ans_core.model import adapters
from ans_core.model.grounding import Grounding
from ans_core.model.network import Network
from tests import tiny
from tests.checkpoints.test_adapter import RL_LORA, SFT_LORA, shaken
from tests.checkpoints.test_sam2 import (
    PROMPTS,
    WIDE,
    drawn,
    ours,
    stock_masks,
    transformers_masks,
    whole,
    write_frames,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folders. `memory` trains both the memory and the decoder, SFT and RL the decoder for
    `[SEG]`."""
    folder, made, hash_of = tmp_path_factory.mktemp("run"), tiny.build(), checkpoint.weights_hash
    sam2 = drawn(temporal=True, **WIDE)
    model = Network(replace(made.config, grounding=sam2.config), made.tokenizer)
    model.sam2.load_state_dict(sam2.state_dict())
    model.keep_original_decoder()
    base, sft, rl = folder / "base/base", folder / "sft", folder / "rl"
    checkpoint.save(model, base, metadata={})
    named = {
        f"sam2.{name}": p
        for name, p in model.sam2.named_parameters()
        if name.startswith(("memory_encoder", "sam_mask_decoder"))
    }
    for seed, name in enumerate(("memory", "memory/last/epoch-0003")):
        checkpoint.save_delta(
            shaken(named, seed), folder / name, base_hash=hash_of(base), config={"stage": "memory"}
        )
    of_memory = memory.load_into(model, folder / "memory", base=base)
    adapters.prepare_sft(model, adapters.lora_config(**SFT_LORA), seed=1)
    both = memory.joined(of_memory, shaken(adapters.trained(model), 1))
    checkpoint.save_delta(
        both, sft, base_hash=hash_of(base), config={"stage": "sft", "lora": SFT_LORA, "seed": 0}
    )
    modules = adapters.policy_modules(model, drawing=True)
    policies = adapters.Policies(sft_model(base, sft), adapters.rl_config(**RL_LORA, modules=modules), seed=2)
    config = {"stage": "rl", "lora": RL_LORA, "modules": modules, "seed": 0}
    checkpoint.save_delta(shaken(policies.tensors("policy"), 2), rl, base_hash=hash_of(sft), config=config)
    checkpoint.save(rl_model(base, sft, rl), folder / "model", metadata={})
    return folder


def same(one: Grounding, other: Grounding) -> bool:
    tensors = sam2_files.stock_state(one), sam2_files.stock_state(other)
    assert tensors[0].keys() == tensors[1].keys()
    return all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@pytest.mark.slow
def test_every_stage_since_memory_has_the_sam2_of_the_model(run: Path):
    own = Sa2VA.from_pretrained(run / "model").sam2
    for name in ("memory", "sft", "rl", "model"):
        assert same(sam2_export.read(run / name), own), name
    assert not same(sam2_export.read(run / "base/base"), own)
    earlier = sam2_export.read(run / "memory/last/epoch-0003")
    assert not same(earlier, own)
    assert same(sam2_export.read(run / "memory/last/epoch-0003", base=run / "base/base"), earlier)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROMPTS)
def test_the_stock_predictor_and_transformers_draw_the_masks_of_the_models_own_grounding(
    run: Path, tmp_path: Path, kind: str
):
    (tmp_path / "frames").mkdir()
    frames, prompt = write_frames(tmp_path / "frames"), PROMPTS[kind]
    sam2 = Sa2VA.from_pretrained(run / "model").sam2
    assert sam2_export.write(sam2_export.read(run / "model"), tmp_path / "out", metadata={})
    mine, theirs = whole(ours(sam2, frames, prompt)), stock_masks(tmp_path / "out/sam2", frames, prompt)
    assert float((mine[1:] - mine[:-1]).abs().max()) > 0.1
    assert float((mine - theirs).abs().max()) < 2e-3 * float(theirs.abs().max())
    sam2.binarize_mask_from_pts_for_mem_enc = True  # as transformers does
    mine = ours(sam2, frames, prompt)
    theirs = transformers_masks(
        Sam2VideoModel.from_pretrained(tmp_path / "out/transformers"), sam2, frames, prompt
    )
    assert float((mine - theirs).abs().max()) < 5e-3 * float(theirs.abs().max())


def test_an_epoch_of_a_sam2_alone_has_the_size_that_it_was_trained_at(tmp_path: Path):
    sam2 = drawn(temporal=True)
    sam2_files.save(sam2, tmp_path / "base/sam2", metadata={})
    base_hash = sam2_files.identity(tmp_path / "base/sam2")[1]
    tensors = {"sam2.no_mem_embed": torch.ones_like(sam2.no_mem_embed)}
    config = {"stage": "memory", "image_size": 96}
    checkpoint.save_delta(tensors, tmp_path / "memory/last/epoch-0001", base_hash=base_hash, config=config)
    found = sam2_export.read(tmp_path / "memory/last/epoch-0001")
    assert (found.image_size, bool((found.no_mem_embed == 1).all())) == (96, True)


def test_trained_tensors_without_their_base_or_of_another_stage_are_refused(
    run: Path, tmp_path: Path, own_model: Network
):
    checkpoint.save(own_model, tmp_path / "other", metadata={})
    with pytest.raises(ValueError, match=r"sft was trained on the base .*; use its own base"):
        sam2_export.read(run / "sft", base=tmp_path / "other")
    for stage, told in (
        (
            "memory",
            "memory holds trained tensors alone, and no base/base or base/sam2 lies beside it; name the base with --base",
        ),
        (
            "rl",
            "rl was trained on the output of SFT, and there is no .*/sft; give SFT's output, or the model",
        ),
        ("rft", "rft is the output of the stage 'rft', which holds no SAM2"),
    ):
        checkpoint.save_delta({"x": torch.ones(1)}, tmp_path / stage, base_hash="", config={"stage": stage})
        with pytest.raises(ValueError, match=told):
            sam2_export.read(tmp_path / stage)
