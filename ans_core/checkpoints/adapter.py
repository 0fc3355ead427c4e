"""Trained tensors of SFT, or of SFT and RL -> one PEFT adapter over the base, which PEFT itself loads (some
percent of a model's bytes).

ans convert runs/tiny/rl DST --to adapter
PeftModel.from_pretrained(Sa2VA.from_pretrained(BASE), DST)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ans_core.checkpoints import checkpoint, memory
from ans_core.checkpoints import folder as folders
from ans_core.model import adapters
from ans_core.model.backbones import BACKBONES
from ans_core.written import atomic_folder

WEIGHTS = "adapter_model.safetensors"
"""PEFT's name of the file."""
PREFIX = "base_model.model."
"""Prefix of every tensor's name in such a file."""
MODULES = (
    "embed_tokens",
    "lm_head",
    *{name for kind in BACKBONES.values() for name in kind.projectors},
    *adapters.DRAWING,
)
"""Modules that SFT trains fully."""


def write_adapter(source: Path, target: Path, *, base: Path, sft: Path | None) -> None:
    """Write the adapter. `source`: the output of stage sft, or that of rl with SFT's as `sft`; `base`: the
    model folder that SFT started from.

    Two LoRAs become one of the sum of their ranks: W + s1 B1 A1 + s2 B2 A2 = W + [s1 B1, s2 B2] [A1; A2].
    What RL trained whole takes the place of SFT's. Raises ValueError for a folder of something else, and
    where the parts were not trained one on the other.
    """
    base_hash = checkpoint.weights_hash(base)
    if sft is None:
        tensors, config = checkpoint.load_delta(source, base_hash=base_hash)
        if config["lora"] is None:
            raise ValueError(f"{source} trained nothing (sft.optim.steps 0): its model is the base, {base}")
        followed, tensors, modules = _of_memory(tensors, source)
        rank, alpha, merged = config["lora"]["rank"], config["lora"]["alpha"], followed | _plain(tensors)
        ranks = config["lora"].get("rank_pattern", {})
    else:
        before, first = checkpoint.load_delta(sft, base_hash=base_hash)
        after, second = checkpoint.load_delta(source, base_hash=checkpoint.weights_hash(sft))
        followed, before, modules = _of_memory(before, sft)
        if first["lora"] is None:  # SFT passed the base through: RL's LoRA is the only one
            rank, alpha, ranks, merged = (
                second["lora"]["rank"],
                second["lora"]["alpha"],
                {},
                followed | _plain(after),
            )
        else:
            rank = alpha = first["lora"]["rank"] + second["lora"]["rank"]
            ranks = {
                name: layer_rank + second["lora"]["rank"]
                for name, layer_rank in first["lora"].get("rank_pattern", {}).items()
            }
            merged = followed | _joined(_plain(before), _plain(after), _scale(first), _scale(second))
    full_modules = [
        name
        for name in dict.fromkeys((*MODULES, *modules))
        if any(f".{name}." in f".{key}" for key in merged)
    ]
    # PEFT wants such a module whole, the frozen parts too
    for name, tensor in folders.tensors(folders.weight_files(base)):
        if name not in merged and any(f".{module}." in f".{name}" for module in full_modules):
            merged[name] = tensor.clone()
    peft = adapters.lora_config(
        rank=rank, alpha=alpha, dropout=0.0, modules_to_save=full_modules, rank_pattern=ranks
    )
    peft.base_model_name_or_path = str(base)
    peft.inference_mode = True
    size = sum(t.numel() * t.element_size() for t in merged.values())
    with atomic_folder(target, size=size) as unfinished:
        save_file(
            {PREFIX + name: tensor.contiguous() for name, tensor in merged.items()},
            unfinished / WEIGHTS,
            metadata={"format": "pt"},
        )
        peft.save_pretrained(str(unfinished))
        folders.write_manifest(unfinished, {"stage": "convert", "source": str(source), "base": base_hash})


def _of_memory(
    tensors: dict[str, Tensor], source: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Divide SFT's delta into what the stage `memory` trained and SFT's own; return both, and the names of
    the former's modules.

    Raises ValueError for a parameter that belongs to no module of SAM2: an adapter holds whole modules.
    """
    first, sft_tensors = memory.taken(tensors)
    if single := [name for name in first if name.count(".") < 2]:
        raise ValueError(
            f"{source} holds {single[0]}, which the stage `memory` trained and no adapter can hold; use the "
            "model (model/)"
        )
    first |= {
        name.replace(memory.DECODER, memory.ORIGINAL): t
        for name, t in first.items()
        if name.startswith(memory.DECODER)
    }
    return first, sft_tensors, sorted({name.split(".")[1] for name in first})


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the adapter from the tensors' names."""
    return {
        k.replace(".modules_to_save.*.", ".").replace(".*.", ".").replace(".default.", "."): t
        for k, t in tensors.items()
    }


def _scale(config: dict[str, Any]) -> float:
    return float(config["lora"]["alpha"] / config["lora"]["rank"])


def _joined(
    one: dict[str, Tensor], other: dict[str, Tensor], scale: float, other_scale: float
) -> dict[str, Tensor]:
    joined = one | {name: tensor for name, tensor in other.items() if ".lora_" not in name}
    for name in one:
        if name.endswith(".lora_A.weight"):
            joined[name] = torch.cat([one[name], other[name]])
        elif name.endswith(".lora_B.weight"):
            joined[name] = torch.cat([scale * one[name], other_scale * other[name]], dim=1)
    return joined
