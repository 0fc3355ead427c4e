"""Settings of a stage -> what the training loop wants; and how the machine is set up before it; its curves -> figures."""

from __future__ import annotations

import torch

from ans_core.config import Launch, Optim
from ans_core.dist import deterministic, pick_device
from ans_core.loop import Curves, Machine, Schedule

LAST = 50
"""Steps at the end that a training stage's own figures are means of."""


def schedule_of(optim: Optim) -> Schedule:
    values = optim.model_dump()
    del values["batch"]  # the mixture's business
    return Schedule(**values)


def machine_of(launch: Launch, dtype: str = "fp32") -> Machine:
    """Also sets threads and determinism for the process."""
    if launch.threads:
        torch.set_num_threads(launch.threads)
    deterministic(launch.deterministic)
    return Machine(device=pick_device(launch.device), dtype=dtype, deepspeed_stage=launch.deepspeed_stage, workers=launch.workers)


def weights_dtype(dtype: str) -> torch.dtype | None:
    """Of the weights that a forward pass of `dtype` reads: autocast takes them as they are stored."""
    return torch.float32 if dtype == "fp32" else None


def last_means(curves: Curves) -> dict[str, float]:
    """Mean of every curve over its last steps."""
    end = max(step for step, *_ in curves)
    rows: dict[str, list[float]] = {}
    for step, name, value in curves:
        if step > end - LAST:
            rows.setdefault(name, []).append(value)
    return {f"train/{name}": sum(values) / len(values) for name, values in rows.items()}
