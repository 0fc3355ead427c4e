"""The model that the agent's stages begin with, and its operations, as the settings have them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from ans_core.agent.episode import Toolbox
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.policy import load_base
from ans_core.checkpoints import checkpoint
from ans_core.config import Config, Lora, Optim, Rl
from ans_core.config.training import KeepingOptim
from ans_core.model.network import Network
from ans_core.precision import inference_dtype

LOOP: Final = "agent"
"""The loop of RL that practises in episodes."""


def base_of(cfg: Config, path: Path, *, device: torch.device, dtype: torch.dtype | None) -> Network:
    """Return the model that an agent starts from, with the resolution of the settings. dtype: None keeps the
    stored one."""
    return load_base(
        path,
        operations=OPERATIONS,
        device=device,
        tiles=cfg.agent.tiles,
        pixels=(cfg.agent.min_pixels, cfg.agent.max_pixels),
        dtype=dtype,
    )


def toolbox_of(
    cfg: Config,
    model: Network,
    *,
    adapters_off: Callable[[], AbstractContextManager[object]] = nullcontext,
    make: Callable[..., Toolbox] = Toolbox,
) -> Toolbox:
    """Return the operations on an agent's model; masks are drawn by `agent.segmenter`, where there is one.
    adapters_off: see Toolbox. make: another class of it."""
    agent = cfg.agent
    return make(
        model,
        adapters_off=adapters_off,
        seconds=agent.episode.time_limit_s,
        reader=agent.reader,
        segmenter=_segmenter(agent.segmenter, model.device) if agent.segmenter else None,
    )


def rl_of_episodes(cfg: Config, optim: Optim, **settings: Any) -> Rl:
    """Return the settings of RL's steps on whole episodes. Of the longest episode all turns count."""
    tokens = (cfg.agent.episode.calls + 2) * cfg.agent.episode.turn_tokens
    optim = KeepingOptim(**optim.model_dump())
    return Rl(loops={LOOP: 1.0}, optim=optim, lora=Lora(dropout=0.0), max_tokens=tokens, **settings)


@lru_cache(maxsize=1)
def _segmenter(folder: str, device: torch.device) -> Network:
    return checkpoint.load(folder, dtype=inference_dtype(device), device=device).requires_grad_(False)
