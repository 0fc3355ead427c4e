"""Turn a stage's settings into what the training loop takes, set up the machine, and summarise curves as metrics."""

from __future__ import annotations

import torch

from ans_core.config import Launch, Optim
from ans_core.dist import deterministic, pick_device
from ans_core.loop import Curves, Machine, Schedule

LAST = 50
"""A training stage's own metrics are means over this many last steps."""


def schedule_of(optim: Optim) -> Schedule:
    values = optim.model_dump()
    del values["batch"]  # used by the mixture
    return Schedule(**values)


def machine_of(launch: Launch, dtype: str = "fp32") -> Machine:
    """Return the machine; also sets threads and determinism for the process."""
    if launch.threads:
        torch.set_num_threads(launch.threads)
    deterministic(launch.deterministic)
    return Machine(
        device=pick_device(launch.device),
        dtype=dtype,
        deepspeed_stage=launch.deepspeed_stage,
        workers=launch.workers,
        keep_states=launch.keep_states,
        halt_on_nan=launch.halt_on_nan,
        profile_steps=launch.profile_steps,
    )


def weights_dtype(dtype: str) -> torch.dtype | None:
    """Return the dtype to load weights in for a forward pass of `dtype`: None for autocast, which keeps the stored dtype."""
    return torch.float32 if dtype == "fp32" else None


def last_means(curves: Curves) -> dict[str, float]:
    """Return the mean of every curve over its last steps."""
    end = max(step for step, *_ in curves)
    rows: dict[str, list[float]] = {}
    for step, name, value in curves:
        if step > end - LAST:
            rows.setdefault(name, []).append(value)
    return {f"train/{name}": sum(values) / len(values) for name, values in rows.items()}
