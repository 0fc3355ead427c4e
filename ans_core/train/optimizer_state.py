"""The optimizer's state as whole tensors by the names of the parameters: read from plain AdamW (and Muon),
ZeRO-2 or ZeRO-3, and given to any of them.

DeepSpeed's own files are cut to the processes that wrote them. What is read here fits any number of
processes, with or without DeepSpeed, and the same ones to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ans_core.dist import rank, world_size
from ans_core.train import sharding

MOMENTS = ("exp_avg", "exp_avg_sq")


def read(
    module: nn.Module, optimizer: Any, wrapped: Any, *, deepspeed_stage: int
) -> dict[str, dict[str, Tensor]]:
    """Return name -> what the optimizer keeps (AdamW: `step`, `exp_avg`, `exp_avg_sq`), copied to main
    memory, on the first process ({} on the others). All processes must call it.

    optimizer: accelerate's; wrapped: DeepSpeed's engine, unused without it. Parameters that never had a
    gradient have no state.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not deepspeed_stage:
        states = (
            {p: state for part in _parts(optimizer) for p, state in part.state.items()} if rank() == 0 else {}
        )
        return {
            name: {key: value.to("cpu", copy=True) for key, value in states[p].items()}
            for name, p in trained.items()
            if p in states
        }
    from deepspeed.utils import safe_get_full_optimizer_state  # takes seconds

    parts = wrapped.optimizer
    divided = parts.optimizer.state
    if not divided:  # no step moved anything so far
        return {}
    if deepspeed_stage < 3:
        # of several groups of parameters DeepSpeed has linked the first one's state alone
        parts._hp_optimizer_states_linked = False
        parts._lazy_init_hp_params_optimizer_state()
    step = next(iter(divided.values()))["step"]
    moments: dict[str, dict[str, Tensor]] = {}
    for name, p in trained.items():
        full = {moment: safe_get_full_optimizer_state(p, moment) for moment in MOMENTS}
        if rank() == 0:
            moments[name] = {
                "step": step.cpu().clone(),
                **{moment: value.cpu() for moment, value in full.items()},
            }
    return moments


def write(
    state: Mapping[str, Mapping[str, Tensor]],
    module: nn.Module,
    optimizer: Any,
    wrapped: Any,
    *,
    deepspeed_stage: int,
) -> None:
    """Give a fresh optimizer this state; under DeepSpeed also the weights, as the module has them. All
    processes must call it, with the same state."""
    if not deepspeed_stage:
        holders = {
            p: (part, group)
            for part in _parts(optimizer)
            for group in part.param_groups
            for p in group["params"]
        }
        for name, p in module.named_parameters():
            if name in state:
                part, group = holders[p]
                devices = {"step": _step_device(group, p)}
                part.state[p] = {
                    key: value.to(devices.get(key, p.device), copy=True) for key, value in state[name].items()
                }
        return
    parts = wrapped.optimizer
    step = max((values["step"] for values in state.values()), default=None)
    if step is not None:
        for part in (
            parts.fp32_partitioned_groups_flat
            if deepspeed_stage == 3
            else parts.single_partition_of_fp32_groups
        ):
            parts.optimizer.state[part] = {
                "step": step.to(_step_device(parts.optimizer.param_groups[0], part), copy=True),
                **{moment: torch.zeros_like(part) for moment in MOMENTS},
            }
        if deepspeed_stage < 3:
            # so that parameters find their place in it; DeepSpeed does so after a step
            parts._lazy_init_hp_params_optimizer_state()
    for name, p in module.named_parameters():
        if p.requires_grad:
            _set(p, sharding.read(p), None)
            for moment in MOMENTS if name in state else ():
                _set(p, state[name][moment], moment)


def _step_device(group: Mapping[str, Any], p: Tensor) -> torch.device:
    """Return where AdamW keeps the number of steps: beside the parameters if it is fused."""
    return p.device if group.get("fused") else torch.device("cpu")


def _parts(optimizer: Any) -> Sequence[Optimizer]:
    """Return the one optimizer that accelerate wraps, or the several of it."""
    return getattr(optimizer.optimizer, "parts", (optimizer.optimizer,))


def _set(p: Any, full: Tensor, moment: str | None) -> None:
    """Set this process's part of a moment, or of the weights that the optimizer keeps (None), as DeepSpeed's
    `safe_set_...` functions do; those want parameters that ZeRO-3 divides evenly."""
    if sharding.is_divided(p):
        size = p.ds_tensor.numel()
        padded = F.pad(full.flatten(), (0, size * world_size() - full.numel()))
        p._z3_optimizer.set_local_hp_param(padded[rank() * size :][:size], p, moment)
    else:
        p.set_full_hp_param(full, moment)
