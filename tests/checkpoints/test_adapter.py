"""Trained tensors as a PEFT adapter: loaded by PEFT onto the base, it is the model that the stages hand
on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from ans_core.checkpoints import adapter, checkpoint
from ans_core.checkpoints.trained import rl_model, sft_model
from ans_core.inference.generation import seg_embeddings_of
from ans_core.inference.options import PredictOptions
from ans_core.inference.prefill import prompt
from ans_core.inference.sa2va import Sa2VA
from ans_core.model import adapters
from ans_core.model.network import Network
from ans_core.types import Request
from tests import tiny

SFT_LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
RANKS = {"internvl.model.language_model.layers.0.mlp.down_proj": 7}
"""A layer of another rank (sft.lora_ranks_from)."""
RL_LORA = {"rank": 2, "alpha": 6, "dropout": 0.0}


def shaken(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """As after a training: also LoRA's B, which starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }


@pytest.fixture(scope="module", params=[("caption", "mask"), ("caption",)], ids=["both loops", "loop 1"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    model = tiny.build()
    checkpoint.save(model, folder / "base", metadata={})
    lora = SFT_LORA if "mask" in request.param else {**SFT_LORA, "rank_pattern": RANKS}
    adapters.prepare_sft(model, adapters.lora_config(**lora), seed=1)
    config = {"stage": "sft", "lora": lora, "seed": 0}
    hash_of = checkpoint.weights_hash
    checkpoint.save_delta(
        shaken(adapters.trained(model), 1), folder / "sft", base_hash=hash_of(folder / "base"), config=config
    )
    modules = adapters.policy_modules(model, drawing="mask" in request.param)
    policies = adapters.Policies(
        sft_model(folder / "base", folder / "sft"), adapters.rl_config(**RL_LORA, modules=modules), seed=2
    )
    config = {"stage": "rl", "lora": RL_LORA, "modules": modules, "seed": 0}
    checkpoint.save_delta(
        shaken(policies.tensors("policy"), 2), folder / "rl", base_hash=hash_of(folder / "sft"), config=config
    )
    return folder


def outputs(model: Network) -> list[torch.Tensor]:
    request = Request(frames=(tiny.picture(0),), text="<image>\nPlease segment the red square.")
    with torch.no_grad():
        prompted = prompt(model, [request])
        ids = model.tokenizer.encode("It is [SEG].")
        (embedding,) = seg_embeddings_of(model, prompted, [ids])
        frames = model.sam2.encode(PredictOptions().pixels(model, prompted.images[0]))
        return [embedding, model.sam2.decode(frames, torch.zeros(1, dtype=torch.long), embedding).logits]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_peft_loads_the_adapter_onto_the_base(runs: Path, tmp_path: Path, stage: str):
    sft = runs / "sft" if stage == "rl" else None
    adapter.write_adapter(runs / stage, tmp_path / "adapter", base=runs / "base", sft=sft)
    base = Sa2VA.from_pretrained(runs / "base")
    before = outputs(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = (
        rl_model(runs / "base", runs / "sft", runs / "rl")
        if stage == "rl"
        else sft_model(runs / "base", runs / "sft")
    )
    for one, other, start in zip(outputs(loaded.base_model.model), outputs(expected), before, strict=True):
        assert (one - other).abs().max() < 1e-4 * other.abs().max()
        assert (one - start).abs().max() > 1e-2 * other.abs().max()
    merged = loaded.merge_and_unload()
    assert all(
        (a - b).abs().max() < 1e-4 * b.abs().max()
        for a, b in zip(outputs(merged), outputs(expected), strict=True)
    )


def test_what_was_trained_on_something_else_is_refused(runs: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="was trained on the base"):
        adapter.write_adapter(runs / "rl", tmp_path / "adapter", base=runs / "base", sft=None)
    with pytest.raises(ValueError, match=r"holds no delta\.json"):
        adapter.write_adapter(runs / "base", tmp_path / "adapter", base=runs / "base", sft=None)
    assert not (tmp_path / "adapter").exists()
