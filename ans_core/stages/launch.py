"""Turn a stage's settings into what the training loop takes, set up the machine, show LoRA's ranks, and
summarise curves as metrics."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ans_core import precision
from ans_core.checkpoints.trained import STEPS
from ans_core.config import Launch, Optim
from ans_core.config.training import DataOptim
from ans_core.dist import deterministic, pick_device, rank, world_size
from ans_core.model.network import Network
from ans_core.processes import cores
from ans_core.train import states
from ans_core.train.loop import Curves, Machine, Schedule, write_curves
from ans_core.train.watch import START, VALIDATION_LOSS
from ans_core.types import Log

LAST = 50
"""A training stage's own metrics are means over this many last steps."""


def schedule_of(optim: Optim, *, inner_steps: int = 1) -> Schedule:
    """Return the schedule. inner_steps: of RL, whose rollouts are saved for the first process alone."""
    values = optim.model_dump(exclude={"batch", "epochs"})  # the batch is used by the mixture
    return Schedule(**values, save_unit=inner_steps if world_size() > 1 else 1)


def machine_of(launch: Launch, dtype: str = "fp32", *, log: Log | None = None) -> Machine:
    """Return the machine; also sets threads and determinism for the process. With `log`, what `dtype` became
    is printed and logged."""
    if launch.threads:
        torch.set_num_threads(launch.threads)
    device = pick_device(launch.device)
    deterministic(device.type == "cpu" if launch.deterministic == "auto" else launch.deterministic)
    chosen = precision.resolved(dtype, device)
    if log is not None and rank() == 0:
        print(
            f"precision: {chosen} as set" if dtype == chosen else f"precision: {precision.described(device)}"
        )
        log({"precision/bf16": float(chosen == "bf16")}, 0)
    return Machine(
        device=device,
        dtype=chosen,
        deepspeed_stage=launch.deepspeed_stage,
        workers=min(launch.workers, cores_of_process()),
        keep_states=launch.keep_states,
        halt_on_nan=launch.halt_on_nan,
        profile_steps=launch.profile_steps,
        compile=launch.compile == "layers"
        or (launch.compile == "auto" and device.type == "cuda" and launch.deepspeed_stage < 3),
    )


def show_precision(model: Network, log: Log) -> None:
    """Print and log the precision in which a model that is not trained computes: that of its weights."""
    if rank() == 0:
        print(precision.of_weights(model.dtype, model.device))
        log({"precision/bf16": float(model.dtype == torch.bfloat16)}, 0)


def cores_of_process() -> int:
    """Return this process's share of the cores that it and its neighbours on this machine may use."""
    return max(1, cores() // local_processes())


def local_processes() -> int:
    """Return how many processes of this run are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_shared_memory(
    workers: int, batch_bytes: int, *, processes: int, folder: Path = Path("/dev/shm")
) -> None:
    """Raise RuntimeError if shared memory can't hold a batch of every loader process of `processes` training
    processes: the kernel would kill one in the middle of the run."""
    needed = workers * processes * batch_bytes
    if not folder.is_dir() or needed <= (free := shutil.disk_usage(folder).free):
        return
    raise RuntimeError(
        f"{folder} has {free / 1e6:,.0f} MB free, and {processes} x {workers} loader processes "
        f"(launch.workers) pass batches of up to {batch_bytes / 1e6:,.0f} MB through it: give the container "
        f"more (docker run --shm-size={math.ceil(2 * needed / 1e9)}g; Kubernetes: a volume emptyDir of "
        f"medium Memory at {folder}), or set launch.workers=0"
    )


def lasting(
    optim: DataOptim, section: str, *, samples: int, batch: int | None = None, inner_steps: int = 1
) -> DataOptim:
    """Return the settings with a number of steps: where they say `epochs`, as many as see `samples` samples
    that often. `section`: named in the line that says how many. batch: samples that a step sees; None:
    `optim.batch`. inner_steps: optimizer steps that see the same samples."""
    if not optim.epochs:
        return optim
    batch = batch or optim.batch
    steps = max(1, math.ceil(optim.epochs * samples / batch)) * inner_steps
    if rank() == 0:
        print(
            f"{section}.optim.epochs {optim.epochs:g}: {samples:,} samples, {batch} a step: {steps:,} steps"
        )
    return optim.model_copy(update={"steps": steps, "epochs": 0.0})


def weights_dtype(dtype: str) -> torch.dtype | None:
    """Return the dtype to load weights in for a forward pass of `dtype`: None for autocast, which keeps the
    stored dtype."""
    return torch.float32 if dtype == "fp32" else None


def show_ranks(lora: Mapping[str, Any] | None, log: Log) -> None:
    """Print the ranks that layers have of their own by kind of layer, and log their means; nothing if all
    have `lora.rank`."""
    if rank() > 0 or not lora or "rank_pattern" not in lora:
        return
    kinds: dict[str, list[int]] = {}
    for name, layer_rank in lora["rank_pattern"].items():
        kinds.setdefault(name.rpartition(".")[2], []).append(layer_rank)
    print(f"{'LoRA ranks':<12}  layers  smallest   mean  largest")
    for kind, ranks in kinds.items():
        print(f"{kind:<12}  {len(ranks):6}  {min(ranks):8}  {sum(ranks) / len(ranks):5.1f}  {max(ranks):7}")
    log({f"lora_rank/{kind}": sum(ranks) / len(ranks) for kind, ranks in kinds.items()}, 0)


def last_means(curves: Curves) -> dict[str, float]:
    """Return the mean of every curve over its last steps."""
    end = max(step for step, *_ in curves)
    rows: dict[str, list[float]] = {}
    for step, name, value in curves:
        if step > max(end - LAST, START):
            rows.setdefault(name, []).append(value)
    return {f"train/{name}": sum(values) / len(values) for name, values in rows.items()}


def write_records(out: Path, scratch: Path, curves: Mapping[str, Curves], moved: Mapping[str, bool]) -> None:
    """Write a training's records beside its tensors: curves by phase, which parts of the model moved, and the
    pictures that it drew."""
    write_curves(out / "curves.csv", curves)
    (out / "moved.json").write_text(json.dumps(moved, indent=1))
    if (scratch / "samples").is_dir():
        shutil.copytree(scratch / "samples", out / "samples")


def write_trained(
    write: Callable[[Path], None],
    module: nn.Module,
    name: str,
    curves: Curves,
    moved: Mapping[str, bool],
    *,
    out: Path,
    scratch: Path,
    keep_best: int,
    device: torch.device,
) -> None:
    """Write the weights of the training `name` and its records to `out`, and those kept on the way, of the best
    `keep_best` of its validations, to `out/steps/<N>`. The module ends with the last that were written. All processes
    must call it. write: writes the module's weights to a folder, in place of what it holds."""
    write(out)
    if rank() == 0:
        write_records(out, scratch, {name: curves}, moved)
    folder, ended = scratch / name, 1 + max((step for step, *_ in curves), default=0)
    # a start before this one may have gone further than this one, and kept the weights of that
    kept = [steps for steps in states.saved_steps(folder) if steps <= ended]
    for steps in best_of(kept, curves, count=keep_best):
        states.load_weights(states.step_file(folder, steps), steps, module, device=device)
        write(out / STEPS / str(steps))


def best_of(steps: Sequence[int], curves: Curves, *, count: int) -> list[int]:
    """Return the `count` of these numbers of steps whose validation loss is lowest, in order; 0: all. One that
    is not finite is worse than any other."""
    if not count:
        return list(steps)
    losses = {step + 1: value for step, name, value in curves if name == VALIDATION_LOSS}
    ranked = sorted(steps, key=lambda step: (not math.isfinite(losses[step]), losses[step]))
    return sorted(ranked[:count])
