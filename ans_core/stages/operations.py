"""The operations of the agent's stages, as the settings have them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

from ans_core.agent.episode import Toolbox
from ans_core.checkpoints import checkpoint
from ans_core.config import Config
from ans_core.model.network import Network
from ans_core.precision import inference_dtype


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


@lru_cache(maxsize=1)
def _segmenter(folder: str, device: torch.device) -> Network:
    return checkpoint.load(folder, dtype=inference_dtype(device), device=device).requires_grad_(False)
