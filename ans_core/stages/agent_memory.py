"""Settings and a model's shapes -> what the agent's `rft` holds on each GPU."""

from __future__ import annotations

import math

from ans_core.agent.policy import set_resolution
from ans_core.config import Config
from ans_core.model.checkpointing import layers_again
from ans_core.model.footprint import MicroBatch, TextShape, all_activations, cache_bytes, parameters_of
from ans_core.model.network import Network
from ans_core.stages.gpu_memory import StageMemory, tokens_of_picture

ADAPTERS = 3
"""Policy, teacher, reference."""


def rft_memory(cfg: Config, model: Network) -> StageMemory:
    """Count the agent's RL where every episode is as long as `agent.episode.tokens` allows: a group is one
    row, in which the first picture stands once; its overviews are as large as pictures come. `model`: without
    adapters, which gets the agent's resolution."""
    agent, episode = cfg.agent, cfg.agent.episode
    set_resolution(model, tiles=agent.tiles, pixels=(agent.min_pixels, agent.max_pixels))
    counts = parameters_of(model, rank=agent.sft.lora.rank)
    projectors = [getattr(model.vlm.model, name) for name in model.backbone.projectors]
    trained = counts.adapters + sum(p.numel() for module in projectors for p in module.parameters())
    overview = min(tokens_of_picture(model), episode.tokens)
    rest = episode.tokens - overview
    optim, layers = agent.rft.optim, TextShape.of(model).layers
    rows = MicroBatch(
        rows=math.ceil(optim.batch / (cfg.launch.of("rft").processes * optim.accumulate)),
        tokens=overview + agent.rft.group * rest,
        learned=agent.rft.group * min(rest, episode.turn_tokens * (episode.calls + 1)),
    )
    again = layers_again(agent.rft.checkpointing)
    options = {"rank": agent.sft.lora.rank, "dropout": agent.sft.lora.dropout > 0, "half": True}
    return StageMemory(
        parts={
            "weights": counts.base + ADAPTERS * 4 * trained,
            "gradients": 4 * trained,
            "optimizer": 8 * trained,
            "activations": all_activations(model, [rows], recomputed=again, **options),
            "caches": cache_bytes(model, rows=episode.batch, tokens=episode.tokens),
        },
        recomputed=layers if again is None else again,
        layers=layers,
    )
