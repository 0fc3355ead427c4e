"""Settings and a model's shapes -> what `sft` or `rl` holds on each GPU, and how many layers it computes
again to fit there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ans_core import dist
from ans_core.config import Config
from ans_core.model import adapters
from ans_core.model.checkpointing import layers_again
from ans_core.model.footprint import (
    MicroBatch,
    TextShape,
    all_activations,
    cache_bytes,
    held_bytes,
    loaded_bytes,
    lora_weights,
    parameters_of,
    recomputed_layers,
)
from ans_core.model.network import Network
from ans_core.train.loop import Machine, let_processes_talk
from ans_core.types import Log

RESERVE = 0.08
"""Share of a GPU's memory that is left to CUDA, libraries, communication and fragments."""
LARGE_PICTURE = (4000, 3000)
"""Pixels; of as many tokens as any picture has."""
QUESTION = 64
"""Tokens of a question in RL, with the template's words around it."""
GB = 1e9
Stage = Literal["sft", "rl"]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on each GPU of a stage in its largest micro-batch, by formula."""

    parts: Mapping[str, float]
    """weights, gradients, optimizer, activations, caches (keys and values of rollouts, which are let go
    before activations come)."""
    recomputed: int
    """Layers that are computed again."""
    layers: int

    @property
    def total(self) -> float:
        activations, caches = self.parts["activations"], self.parts["caches"]
        return sum(self.parts.values()) - min(activations, caches)  # never both

    def fits(self, gpu_bytes: int) -> bool:
        return self.total <= gpu_bytes * (1 - RESERVE)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in self.parts.items() if size)
        return f"{self.total / GB:.0f} GB ({parts}; {self.recomputed} of {self.layers} layers computed again)"


def stage_memory(cfg: Config, model: Network, stage: Stage, *, gpu_bytes: int) -> StageMemory:
    """Count a stage as it would run on GPUs of this size. `model`: without adapters, also on the meta
    device."""
    settings, launch, half = getattr(cfg, stage), cfg.launch.of(stage), getattr(cfg, stage).dtype != "fp32"
    counts = parameters_of(model, rank=settings.lora.rank)
    size, of_sft = (2, 4) if half else (4, 4)  # bytes of a frozen weight; of one that SFT has trained
    if stage == "sft":
        frozen, trained = size * (counts.total - counts.full), counts.trained
    else:
        frozen = size * (counts.total - counts.full) + of_sft * counts.full
        trained = lora_weights(model, rank=settings.lora.rank) + copied_weights(
            model, drawing=settings.drawing
        )
    held = held_bytes(
        frozen=frozen,
        trained=trained,
        deepspeed_stage=launch.deepspeed_stage,
        gpus=launch.processes,
        teacher=stage == "rl",
    )
    batches = largest_batches(cfg, model, stage, processes=launch.processes)
    options = {"rank": settings.lora.rank, "dropout": settings.lora.dropout > 0, "half": half}
    layers = TextShape.of(model).layers
    again: int | None
    if settings.checkpointing == "auto":
        again = recomputed_layers(
            model, batches, room=int(gpu_bytes * (1 - RESERVE) - sum(held.values())), **options
        )
    else:
        again = layers_again(settings.checkpointing)
    recomputed = layers if again is None else again
    activations = all_activations(model, batches, recomputed=recomputed, **options)
    caches = rollout_cache(cfg, model, processes=launch.processes) if stage == "rl" else 0
    return StageMemory(
        parts={**held, "activations": activations, "caches": caches}, recomputed=recomputed, layers=layers
    )


def tokens_of_picture(model: Network) -> int:
    return sum(height * width for height, width in model.backbone.cutter.grids(*LARGE_PICTURE))


def copied_weights(model: Network, *, drawing: bool) -> int:
    """Count the weights of modules that RL trains whole, in a copy for each adapter."""
    names = adapters.policy_modules(model, drawing=drawing)
    modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    return sum(p.numel() for module in modules for p in module.parameters())


def largest_batches(cfg: Config, model: Network, stage: Stage, *, processes: int) -> list[MicroBatch]:
    """Return what a process learns from at once, where rows are as long as they may be."""
    sft, grids = cfg.sft, model.backbone.cutter.grids(*LARGE_PICTURE)

    def rows_of_sft(rows: int) -> MicroBatch:
        masks = sft.questions_per_image * sft.frames  # of a clip
        return MicroBatch(
            rows=rows,
            tokens=sft.max_length,
            learned=sft.max_length,
            grids=grids,
            masks=masks,
            frames=sft.frames,
        )

    if stage == "sft":
        return [rows_of_sft(math.ceil(sft.optim.batch / (processes * sft.optim.accumulate)))]
    rl = cfg.rl
    samples, rows = (
        math.ceil(count / (processes * rl.optim.accumulate)) for count in (rl.optim.batch, rl.rows)
    )
    tokens = tokens_of_picture(model) + rl.group * (QUESTION + rl.max_tokens)
    of_loop = MicroBatch(
        rows=samples, tokens=tokens, learned=rl.group * rl.max_tokens, grids=grids, masks=rl.group
    )
    return [of_loop] * len(rl.loops) + ([rows_of_sft(rows)] if rows else [])


def loader_bytes(cfg: Config, model: Network, stage: Stage, *, processes: int) -> int:
    """Return the bytes of what a loader hands over for one step of a process at most."""
    sizes = [
        loaded_bytes(model, batch, mask_size=cfg.sft.mask_size)
        for batch in largest_batches(cfg, model, stage, processes=processes)
    ]
    if stage == "rl":
        for place in range(len(cfg.rl.loops)):
            sizes[place] = math.ceil(sizes[place] * (1 + cfg.rl.oversample))
    return sum(sizes)


def rollout_cache(cfg: Config, model: Network, *, processes: int) -> int:
    """Return the bytes of keys and values of the answers that are sampled together, and of their prompts,
    which the answers share: once as they were read, and once as answers are decoded from them."""
    rl = cfg.rl
    of_micro_batch = math.ceil(rl.optim.batch / (processes * rl.optim.accumulate)) * rl.group
    answers = max(of_micro_batch, min(rl.answers_at_once, of_micro_batch * rl.optim.accumulate))
    prefix = tokens_of_picture(model) + QUESTION
    prompts = math.ceil(answers / rl.group)
    return 2 * cache_bytes(model, rows=prompts, tokens=prefix) + cache_bytes(
        model, rows=answers, tokens=rl.max_tokens
    )


def checkpointed_layers(
    cfg: Config, model: Network, stage: Stage, *, machine: Machine, log: Log
) -> int | None:
    """Return how many layers the stage computes again (None: all), as `checkpointing` says. `model`: with its
    adapters, on its device.

    auto: none on a CPU; on GPUs as few as the largest micro-batch needs beside weights, gradients and
    optimizer. It follows from settings, shapes and free memory, of the process that has least of it, so all
    processes choose alike: all of them must call it.
    """
    settings = getattr(cfg, stage)
    if settings.checkpointing != "auto":
        return layers_again(settings.checkpointing)
    if machine.device.type != "cuda":
        chosen, why = 0, f"on a {machine.device.type.upper()}"
    else:
        let_processes_talk(machine)
        room = -dist.largest(-free_bytes(model, machine), machine.device)
        batches = largest_batches(cfg, model, stage, processes=dist.world_size())
        options = {
            "rank": settings.lora.rank,
            "dropout": settings.lora.dropout > 0,
            "half": machine.dtype == "bf16",
        }
        chosen = recomputed_layers(model, batches, room=room, **options)
        wanted = all_activations(model, batches, recomputed=chosen, **options)
        why = (
            f"up to {wanted / GB:.1f} GB of activations beside weights, gradients and optimizer, which "
            f"leave {room / GB:.1f} GB"
        )
        if wanted > room:
            why += "; the longest rows may not fit: raise optim.accumulate, or lower sft.max_length"
    if dist.rank() == 0:
        print(f"checkpointing: {chosen} of {TextShape.of(model).layers} layers are computed again: {why}")
        log({"checkpointing/layers": float(chosen)}, 0)
    return chosen


def free_bytes(model: Network, machine: Machine) -> int:
    """Return what this process's GPU has left for activations, once gradients and optimizer have come,
    too."""
    free, total = torch.cuda.mem_get_info(machine.device)
    free += torch.cuda.memory_reserved(machine.device) - torch.cuda.memory_allocated(machine.device)
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    held = held_bytes(
        frozen=0, trained=trained, deepspeed_stage=machine.deepspeed_stage, gpus=dist.world_size()
    )
    return int(free - held["gradients"] - held["optimizer"] - RESERVE * total)
