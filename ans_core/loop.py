"""The one training loop: batches and a loss module in, trained parameters and curves out. A run killed at any moment resumes to the same
bits.

No random state is carried over a step: batch and seeds are functions of (run seed, step), the learning rate of the step. The state to
resume from is trained tensors + optimizer + what the loss module keeps, written completely or not at all under `scratch`.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ans_core.dist import rank, seed_everything, shared_means, wait_for_all, world_size
from ans_core.optim import adamw, lr_factor
from ans_core.types import Log

Curves = list[tuple[int, str, float]]
"""(step, name, value) rows of curves.csv."""

KEPT_STATES = 2
"""Number of newest training states that are kept: if one is damaged, the one before is used."""

MAX_SKIPPED = 10
"""The run stops after this many consecutive steps with a non-finite loss or gradient."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    steps: int
    lr: float
    weight_decay: float
    warmup: float
    clip_grad: float
    accumulate: int
    save_every: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the loop runs; on one process this changes no result."""

    device: torch.device
    dtype: str = "fp32"
    """fp32, or bf16 autocast of the forward pass."""
    deepspeed_stage: int = 0
    workers: int = 0


@runtime_checkable
class WholeStep(Protocol):
    """A loss module that sees all of this process's micro-batches of a step before it computes the first of them.

    What its `forward` returns is summed over micro-batches and processes to the step's loss. Losses of other modules are averaged.
    """

    def begin_step(self, batches: Sequence[Any]) -> list[Any]: ...


class _Steps(Dataset[Any]):
    """Micro-batches `start..` of the run as a map-style data set, so that loader workers can prepare them ahead."""

    def __init__(self, make: Callable[[int, int], Any], start: int, schedule: Schedule) -> None:
        self.make, self.start, self.schedule = make, start, schedule

    def __len__(self) -> int:
        return (self.schedule.steps - self.start) * self.schedule.accumulate

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        step, micro = divmod(index, self.schedule.accumulate)
        return self.make(self.start + step, micro)


def train(
    loss_module: nn.Module,
    make_batch: Callable[[int, int], Any],
    *,
    name: str,
    schedule: Schedule,
    machine: Machine,
    seed: int,
    scratch: Path,
    log: Log,
    after_step: Callable[[int], dict[str, float]] | None = None,
    scales: Mapping[str, float] | None = None,
) -> Curves:
    """Run `loss_module(batch) -> (loss, metrics)` for `schedule.steps` optimizer steps and return the curves, averaged over the processes.

    make_batch(step, micro) returns this process's share of micro-batch `micro`. State beside parameters and optimizer is what
    `loss_module.get_extra_state` keeps (saved and restored by name).
    """
    accelerator = _accelerator(machine, schedule)
    optimizer = adamw(loss_module, lr=schedule.lr, weight_decay=schedule.weight_decay, scales=scales or {})
    loss_module.to(machine.device)
    wrapped, optimizer = accelerator.prepare(loss_module, optimizer)
    folder = scratch / name
    start, curves = _resume(folder, loss_module, optimizer, wrapped, machine)
    loader = DataLoader(_Steps(make_batch, start, schedule), batch_size=None, num_workers=machine.workers, shuffle=False)
    batches = iter(loader)
    skipped = 0
    bar = tqdm(
        range(start, schedule.steps), initial=start, total=schedule.steps, desc=name, disable=rank() > 0, mininterval=bar_interval_s()
    )
    for step in bar:
        seed_everything(seed, name, step, rank())
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr * group["scale"] * lr_factor(step, steps=schedule.steps, warmup=schedule.warmup)
        metrics, finite = _step(accelerator, loss_module, wrapped, optimizer, batches, schedule, machine)
        skipped = 0 if finite else skipped + 1
        if skipped > MAX_SKIPPED:
            raise RuntimeError(
                f"{name}: {skipped} steps in a row had a non-finite loss or gradient, the last is step {step}; lower the learning rate"
            )
        if after_step is not None and finite:
            metrics |= shared_means([after_step(step)])
        metrics["skipped"] = float(not finite)
        curves += [(step, key, value) for key, value in metrics.items()]
        if rank() == 0:
            log({f"{name}/{key}": value for key, value in metrics.items()}, step)
            bar.set_postfix_str(f"loss {metrics['loss']:.3f}")
        if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
            _save(folder, step + 1, loss_module, optimizer, wrapped, curves, machine)
    accelerator.free_memory()
    return curves


def bar_interval_s() -> float:
    """Return the seconds between updates of a progress bar: half a minute in a log file, a tenth of a second in a terminal."""
    return 0.1 if sys.stderr.isatty() else 30.0


def _accelerator(machine: Machine, schedule: Schedule) -> Accelerator:
    plugin = None
    if machine.deepspeed_stage:
        plugin = DeepSpeedPlugin(
            zero_stage=machine.deepspeed_stage, gradient_accumulation_steps=schedule.accumulate, gradient_clipping=schedule.clip_grad
        )
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1  # batches are made here; DeepSpeed only needs consistent numbers
        plugin.deepspeed_config["train_batch_size"] = schedule.accumulate * world_size()
        plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    # bf16 is this loop's own autocast: accelerate's would turn the trained tensors of a DeepSpeed run into bf16.
    on_cpu = machine.device.type == "cpu" and plugin is None  # accelerate ignores DeepSpeed if told to use the CPU
    micros = schedule.accumulate
    return Accelerator(cpu=on_cpu, mixed_precision="no", deepspeed_plugin=plugin, gradient_accumulation_steps=micros)


def _step(
    accelerator: Accelerator,
    module: nn.Module,
    wrapped: Any,
    optimizer: Any,
    batches: Iterator[Any],
    schedule: Schedule,
    machine: Machine,
) -> tuple[dict[str, float], bool]:
    """Return (the step's loss and means over the micro-batches of all processes that have the value; whether the weights were updated, the
    same on all processes).

    DeepSpeed divides, clips and steps inside `backward`: there a non-finite loss ends the run before it can spoil the weights.
    """
    found: list[dict[str, float]] = []
    micros = [next(batches) for _ in range(schedule.accumulate)]
    parts = 1
    if isinstance(module, WholeStep):
        parts = schedule.accumulate * world_size()  # undoes two means: accelerate's, and that of DDP or DeepSpeed
        with _autocast(machine):
            micros = module.begin_step(micros)
    for batch in micros:
        with accelerator.accumulate(wrapped):
            with _autocast(machine):
                loss, metrics = wrapped(batch.to(machine.device))
                loss = loss * parts
            _check_for_deepspeed(loss, machine)
            accelerator.backward(loss)  # divides by the number of micro-batches
        found.append({"loss": float(loss.detach()), **metrics})
    totals = shared_means(found)
    if machine.deepspeed_stage:
        totals["grad_norm"] = float(wrapped.get_global_grad_norm() or math.nan)
        return totals, True
    totals["grad_norm"] = float(accelerator.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], schedule.clip_grad))
    finite = math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    return totals, finite


def _autocast(machine: Machine) -> torch.autocast:
    return torch.autocast(machine.device.type, dtype=torch.bfloat16, enabled=machine.dtype == "bf16")


def _check_for_deepspeed(loss: Tensor, machine: Machine) -> None:
    value = float(loss.detach())
    if machine.deepspeed_stage and not math.isfinite(value):
        raise RuntimeError(f"the loss is {value}; lower the learning rate, then start again: it resumes from the last state")


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, by name (the module's own names, also if DDP or DeepSpeed wraps it)."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def _state(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.state_dict().items() if name.endswith("_extra_state")}


def _save(folder: Path, step: int, module: nn.Module, optimizer: Any, wrapped: Any, curves: Curves, machine: Machine) -> None:
    """Write `<folder>/step-N` with a manifest and rename it once complete; then remove states older than the last KEPT_STATES."""
    final, partial = folder / f"step-{step:07d}", folder / f"step-{step:07d}.partial"
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if machine.deepspeed_stage:
        wait_for_all()  # for the folder
        wrapped.save_checkpoint(str(partial), tag="deepspeed", exclude_frozen_parameters=True)
        wait_for_all()  # for the parts of all processes
    if rank() == 0:
        state = {"trained": trained_tensors(module), "extra": _state(module)}
        if not machine.deepspeed_stage:
            state["optimizer"] = optimizer.state_dict()
        torch.save(state, partial / "state.pt")
        (partial / "curves.json").write_text(json.dumps(curves))
        files = {str(p.relative_to(partial)): sha256(p) for p in sorted(partial.rglob("*")) if p.is_file()}
        facts = {"step": step, "processes": world_size(), "deepspeed_stage": machine.deepspeed_stage, "files": files}
        (partial / "manifest.json").write_text(json.dumps(facts))
        for path in partial.rglob("*"):
            _sync(path)
        partial.replace(final)
        _sync(folder)
        for old in _states(folder)[:-KEPT_STATES]:
            shutil.rmtree(old)


def _resume(folder: Path, module: nn.Module, optimizer: Any, wrapped: Any, machine: Machine) -> tuple[int, Curves]:
    """Return (next step, curves so far); (0, []) without a state. A damaged state is moved aside, and the one before it is used.

    A state of another number of processes resumes with the same global batch: rows are functions of the step, so only rounding and
    per-process randomness differ. DeepSpeed's optimizer state is split by process, so it is refused there.
    """
    for path in reversed(_states(folder)):
        manifest = _manifest(path)
        wait_for_all()  # all processes have looked before one of them moves it
        if manifest is None:
            if rank() == 0:
                aside = path.with_name(path.name + ".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                path.replace(aside)
                logging.warning("%s is damaged (a file is missing or differs from its hash) and was put aside as %s", path, aside.name)
            continue
        before = (manifest["processes"], manifest.get("deepspeed_stage", 0))
        if before != (now := (world_size(), machine.deepspeed_stage)):
            if before[1] or now[1]:
                raise RuntimeError(
                    f"{path} was written by {before[0]} processes with launch.deepspeed_stage {before[1]}, this run has {now[0]} with"
                    f" {now[1]}: DeepSpeed's state fits no other number. Start it as before, or delete {folder} to begin anew"
                )
            logging.warning(
                "%d processes go on from a state of %d: the same rows at every step, other rounding, so not the same bits",
                now[0],
                before[0],
            )
        state = torch.load(path / "state.pt", map_location=machine.device, weights_only=True)
        own = dict(module.named_parameters())
        with torch.no_grad():
            for key, value in state["trained"].items():
                own[key].copy_(value)
        module.load_state_dict(state["extra"], strict=False)
        if machine.deepspeed_stage:
            wrapped.load_checkpoint(str(path), tag="deepspeed", load_module_strict=False)
        else:
            optimizer.load_state_dict(state["optimizer"])
        return int(manifest["step"]), [tuple(row) for row in json.loads((path / "curves.json").read_text())]
    return 0, []


def _states(folder: Path) -> list[Path]:
    """Return the complete training states, oldest first."""
    return sorted(folder.glob("step-*[0-9]"))


def _manifest(path: Path) -> dict[str, Any] | None:
    """Return the folder's manifest if every file in it has its hash, else None (a state that was cut off)."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    intact = all((path / f).is_file() and sha256(path / f) == h for f, h in manifest["files"].items())
    return manifest if intact else None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_curves(path: Path, curves: dict[str, Curves]) -> None:
    """Write curves.csv with columns step, name, value; names are `<phase>/<name>`."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "name", "value"))
        for phase, rows in curves.items():
            writer.writerows((step, f"{phase}/{name}", f"{value:.6g}") for step, name, value in rows)
