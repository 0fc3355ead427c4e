"""The base folder and the trained tensors of SFT and RL -> a model."""

from __future__ import annotations

from pathlib import Path

import torch

from ans_core import dist
from ans_core.checkpoints import checkpoint, memory
from ans_core.model import adapters
from ans_core.model.network import Network


def sft_model(base: Path, sft: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Network:
    """Load the base, put SFT's tensors (and those of the stage `memory`, which it holds) in place and merge its LoRA: RL starts from it.
    Raises ValueError if they do not belong together."""
    tensors, config = checkpoint.load_delta(sft, base_hash=checkpoint.weights_hash(base))
    of_memory, tensors = memory.taken(tensors)
    model = checkpoint.load(base, dtype=dtype, device=device)
    memory.put(model, of_memory)
    if config.get("seg_object_score"):
        model.use_seg_object_score()
    tuner = adapters.prepare_sft(model, adapters.lora_config(**config["lora"]), seed=dist.seed_of(config["seed"], "sft lora"))
    adapters.load_trained(model, tensors)
    adapters.merge(tuner)
    return model.requires_grad_(False).eval()


def rl_model(base: Path, sft: Path, rl: Path, *, device: torch.device | str = "cpu") -> Network:
    """Load the merged SFT model and merge RL's policy into it."""
    return _policies(base, sft, rl, device).merged("policy").requires_grad_(False).eval()


def policy_model(base: Path, sft: Path, rl: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Network:
    """Load the model as RL trained it: policy adapter active, not merged."""
    return _policies(base, sft, rl, device, dtype).model.eval()


def _policies(base: Path, sft: Path, rl: Path, device: torch.device | str, dtype: torch.dtype | None = None) -> adapters.Policies:
    tensors, config = checkpoint.load_delta(rl, base_hash=checkpoint.weights_hash(sft))
    policies = adapters.Policies(
        sft_model(base, sft, dtype=dtype, device=device), adapters.rl_config(**config["lora"], modules=config["modules"]), seed=0
    )
    policies.load("policy", tensors)
    return policies
