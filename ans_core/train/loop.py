"""The one training loop: batches and a loss module in, trained parameters and curves out. A run killed at any
moment resumes to the same bits.

No random state is carried over a step: batch and seeds are functions of (run seed, step), the learning rate
of the step. The state to resume from is trained tensors + optimizer + what the loss module keeps, written
completely or not at all under `scratch`.
"""

from __future__ import annotations

import csv
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ans_core import stop
from ans_core.dist import (
    largest,
    rank,
    read_together,
    seed_everything,
    shared_means,
    wait_for_all,
    world_size,
)
from ans_core.precision import autocast
from ans_core.progress import bar_interval_s
from ans_core.train import states
from ans_core.train.optim import lr_factor, optimizer_of
from ans_core.train.states import Curves
from ans_core.train.watch import (
    START,
    GraphWatch,
    Speed,
    Watch,
    check_same_gradient,
    first_spoiled,
    gradient_norms,
    hang_watch,
    note_skipped,
    profiled,
)
from ans_core.types import Log

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
    muon_lr: float = 0.0
    """Not 0: Muon for the matrices of stacked layers."""
    keep_every: int = 0
    """Steps between trained tensors that are kept to the end (`states.step_file`); 0 = none."""
    save_unit: int = 1
    """A state can be written after every so many steps."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the loop runs; on one process this changes no result, but for rounding where layers are
    compiled."""

    device: torch.device
    dtype: str = "fp32"
    """fp32, or bf16 autocast of the forward pass."""
    deepspeed_stage: int = 0
    workers: int = 0
    keep_states: int = 2
    """Newest training states that are kept: if one is damaged, the one before is used."""
    halt_on_nan: bool = False
    """Stop at the first loss or gradient that is not finite, instead of skipping its step."""
    profile_steps: int = 0
    """Steps of which torch.profiler writes a trace."""
    compile: bool = False
    """Whether the language model's layers are compiled."""
    ends_at_once: bool = False
    """Whether a TERM ends the loop in the middle of a step; else all processes write a state after the step
    and end."""

    def autocast(self) -> torch.autocast:
        """Return the forward pass's precision."""
        return autocast(self.device, torch.bfloat16 if self.dtype == "bf16" else torch.float32)


@runtime_checkable
class StepModule(Protocol):
    """A loss module that sees all of this process's micro-batches of a step before it computes the first of
    them.

    What its `forward` returns is summed over micro-batches and processes to the step's loss. Losses of other
    modules are averaged.
    """

    def begin_step(self, batches: Sequence[Any]) -> list[Any]: ...


class _Steps(Dataset[Any]):
    """Micro-batches `start..` of the run as a map-style data set, so that loader workers can prepare them
    ahead."""

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
    watch: Watch | None = None,
) -> Curves:
    """Run `loss_module(batch) -> (loss, metrics)` for `schedule.steps` optimizer steps and return the curves,
    averaged over the processes.

    make_batch(step, micro) returns this process's share of micro-batch `micro`. State beside parameters and
    optimizer is what `loss_module.get_extra_state` keeps (saved and restored by name). With a validation the
    module ends with its best weights.
    """
    watch = watch or Watch()
    if schedule.muon_lr and machine.deepspeed_stage:
        raise ValueError(
            "muon_lr: Muon needs whole matrices, and DeepSpeed divides the optimizer; set muon_lr=0, or "
            "launch.deepspeed_stage=0"
        )
    # SAM2's depthwise convolutions; the copy that it hints at is of a few thousand numbers
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    accelerator = _accelerator(machine, schedule)
    optimizer = optimizer_of(
        loss_module,
        lr=schedule.lr,
        weight_decay=schedule.weight_decay,
        scales=scales or {},
        muon_lr=schedule.muon_lr,
        fused=machine.device.type == "cuda",
    )
    loss_module.to(machine.device)
    wrapped, optimizer = accelerator.prepare(loss_module, optimizer)
    folder, stage = scratch / name, machine.deepspeed_stage
    start, curves = states.resume(
        folder, loss_module, optimizer, wrapped, deepspeed_stage=stage, device=machine.device
    )
    # `make_batch` is a closure, which no other way of starting takes along
    fork = "fork" if machine.workers else None
    loader = DataLoader(
        _Steps(make_batch, start, schedule),
        batch_size=None,
        num_workers=machine.workers,
        shuffle=False,
        multiprocessing_context=fork,
        worker_init_fn=stop.ignore_signals,
        pin_memory=machine.device.type == "cuda",
    )
    skipped, speed, graphs, validation = 0, Speed(watch), GraphWatch(), watch.validation
    bar = tqdm(
        range(start, schedule.steps),
        initial=start,
        total=schedule.steps,
        desc=name,
        disable=rank() > 0,
        mininterval=bar_interval_s(),
    )
    with (
        stop.deferred(not machine.ends_at_once),
        profiled(folder / f"profile-{rank()}.json", machine.profile_steps) as step_profiled,
        states.Writer() as writer,
        hang_watch() as step_begins,
        # its end frees the loader's own iterator, which ends the workers: they ignore the signal by which Python
        # would end them, and a process that fails would wait for them for ever
        closing(batch for batch in loader) as batches,
    ):
        if validation is not None and validation.at_start and not start:
            at_start = {f"val/{key}": value for key, value in validation.measure(0).items()}
            curves += [(START, key, value) for key, value in at_start.items()]
            if rank() == 0:
                log({f"{name}/{key}": value for key, value in at_start.items()}, START)
        for step in bar:
            if validation is not None and validation.exhausted(curves):
                break
            step_begins()
            seed_everything(seed, name, step, rank())
            factor = lr_factor(step, steps=schedule.steps, warmup=schedule.warmup)
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr * group["scale"] * factor
            speed.clear()
            metrics, diagnostics, spoiled = _step(
                accelerator, loss_module, wrapped, optimizer, batches, schedule, machine, watch, speed
            )
            finite = spoiled is None
            skipped = 0 if finite else skipped + 1
            if spoiled is not None:
                _skip(name, step, skipped, metrics, spoiled, folder=folder, watch=watch, machine=machine)
            if after_step is not None and finite:
                metrics |= shared_means([after_step(step)])
            metrics["skipped"] = float(not finite)
            if machine.compile:
                diagnostics |= graphs.metrics(step)
            diagnostics |= writer.metrics()
            if validation is not None and validation.due(step + 1, schedule.steps):
                metrics |= {f"val/{key}": value for key, value in validation.measure(step + 1).items()}
            curves += [(step, key, value) for key, value in metrics.items()]
            if validation is not None and validation.best(curves) == step:
                writer.save_weights(states.best_file(folder), step, loss_module)
            if schedule.keep_every and (step + 1) % schedule.keep_every == 0:
                writer.save_weights(states.step_file(folder, step + 1), step + 1, loss_module)
            if rank() == 0:
                log(
                    {
                        f"{name}/{key}": value
                        for key, value in (metrics | diagnostics | {"lr": schedule.lr * factor}).items()
                    },
                    step,
                )
                bar.set_postfix_str(f"loss {metrics['loss']:.3f}")
            # A signal reaches the processes at different steps: the largest number makes all of them end
            # after this one.
            ending = (
                0
                if machine.ends_at_once or (step + 1) % schedule.save_unit
                else largest(stop.requested(), machine.device)
            )
            if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps or ending:
                check_same_gradient(name, step, metrics["grad_norm"], machine.device)
                keep = machine.keep_states
                writer.save(
                    folder,
                    step + 1,
                    loss_module,
                    optimizer,
                    wrapped,
                    curves,
                    deepspeed_stage=stage,
                    keep=keep,
                )
                if world_size() > 1 and rank() == 0:
                    logging.info("%s", speed.table())
            step_profiled()
            if ending:
                writer.wait()
                # a launcher ends the others soon after the first process that ends, and the first one writes
                # the state
                wait_for_all()
                raise stop.Stopped(ending, step + 1)
    if validation is not None and (best := validation.best(curves)) is not None:
        states.load_weights(states.best_file(folder), best, loss_module, device=machine.device)
    accelerator.free_memory()
    return curves


def _skip(
    name: str,
    step: int,
    skipped: int,
    metrics: Mapping[str, float],
    spoiled: str,
    *,
    folder: Path,
    watch: Watch,
    machine: Machine,
) -> None:
    """Write down what a skipped step learned from, and say which module spoiled it (`spoiled`; empty: not
    known). Raises RuntimeError where the run is to stop."""
    rows = watch.rows(step) if watch.rows is not None else ()
    path = note_skipped(folder, step, metrics, rows, spoiled)
    where = f"{spoiled} is the first module with a non-finite output; " if spoiled else ""
    if machine.halt_on_nan:
        raise RuntimeError(
            f"{name}: loss {metrics['loss']:g} and gradient norm {metrics['grad_norm']:g} at step {step} "
            f"are not both finite, and launch.halt_on_nan is set; {where}{path} names the rows"
        )
    if skipped > MAX_SKIPPED:
        raise RuntimeError(
            f"{name}: {skipped} steps in a row had a non-finite loss or gradient, the last is step {step}; "
            f"lower the learning rate; {where}{path} names the rows"
        )
    if spoiled:
        tqdm.write(f"{name}: step {step} is skipped: {where}{path} names the rows")


def let_processes_talk(machine: Machine) -> None:
    """Make the process group that `train` will use, for what processes exchange before it or without it. All
    of them must call it."""
    if world_size() > 1:
        PartialState(cpu=_on_cpu(machine))


def _on_cpu(machine: Machine) -> bool:
    """Return what accelerate is to be told: told to use the CPU, it ignores DeepSpeed."""
    return machine.device.type == "cpu" and not machine.deepspeed_stage


def _accelerator(machine: Machine, schedule: Schedule) -> Accelerator:
    plugin = None
    if machine.deepspeed_stage:
        plugin = DeepSpeedPlugin(
            zero_stage=machine.deepspeed_stage,
            gradient_accumulation_steps=schedule.accumulate,
            gradient_clipping=schedule.clip_grad,
        )
        # batches are made here; DeepSpeed only needs consistent numbers
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        plugin.deepspeed_config["train_batch_size"] = schedule.accumulate * world_size()
        plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    # bf16 is this loop's own autocast: accelerate's would turn the trained tensors of a DeepSpeed run into
    # bf16.
    micros = schedule.accumulate
    return Accelerator(
        cpu=_on_cpu(machine),
        mixed_precision="no",
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=micros,
    )


def _step(
    accelerator: Accelerator,
    module: nn.Module,
    wrapped: Any,
    optimizer: Any,
    batches: Iterator[Any],
    schedule: Schedule,
    machine: Machine,
    watch: Watch,
    speed: Speed,
) -> tuple[dict[str, float], dict[str, float], str | None]:
    """Return (the step's loss and means over the micro-batches of all processes that have the value; speed
    and norms, for the log alone; None if the weights were updated, the same on all processes, else the module
    of this one that spoiled the step, where it is known).

    DeepSpeed divides, clips and steps inside `backward`, and skips a step whose gradient is not finite.
    """
    micro_metrics: list[dict[str, Any]] = []
    micros = [speed.take(batches) for _ in range(schedule.accumulate)]
    parts = 1
    if isinstance(module, StepModule):
        # undoes two means: accelerate's, and that of DDP or DeepSpeed
        parts = schedule.accumulate * world_size()
        with machine.autocast():
            micros = module.begin_step(micros)
    for batch in micros:
        with accelerator.accumulate(wrapped):
            with machine.autocast():
                loss, metrics = wrapped(batch.to(machine.device))
                loss = loss * parts
            micro_metrics.append({"loss": loss.detach(), **metrics})
            if machine.deepspeed_stage:
                # so that no gradient of an infinite loss is finite
                loss = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)
            accelerator.backward(loss)  # divides by the number of micro-batches
    diagnostics: dict[str, float] = {}
    if machine.deepspeed_stage:
        totals = shared_means(micro_metrics)
        norm = wrapped.get_global_grad_norm()
        totals["grad_norm"] = math.nan if norm is None else float(norm)
        finite = math.isfinite(totals["grad_norm"])
    else:
        norms = gradient_norms(module, watch.part_of)
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        norms["grad_norm"] = accelerator.clip_grad_norm_(parameters, schedule.clip_grad)
        *micro_metrics, diagnostics = read_together(
            [*micro_metrics, norms]
        )  # the one time that a step waits for its device
        totals = shared_means(micro_metrics) | {"grad_norm": diagnostics.pop("grad_norm")}
        finite = math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    diagnostics |= speed.metrics(machine.device)
    return totals, diagnostics, None if finite else _spoiled(module, micros, micro_metrics, machine, watch)


def _spoiled(
    module: nn.Module,
    micros: Sequence[Any],
    micro_metrics: Sequence[Mapping[str, Any]],
    machine: Machine,
    watch: Watch,
) -> str:
    """Name what spoiled the first of this process's micro-batches with a non-finite loss. Under ZeRO-3 a
    process can't run alone."""
    broken = [
        batch
        for batch, values in zip(micros, micro_metrics, strict=True)
        if not math.isfinite(float(values["loss"]))
    ]
    if not broken or not watch.runs_again or machine.deepspeed_stage == 3:
        return ""
    with machine.autocast():
        return first_spoiled(module, broken[0].to(machine.device))


def write_curves(path: Path, curves: dict[str, Curves]) -> None:
    """Write curves.csv with columns step, name, value; names are `<phase>/<name>`."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "name", "value"))
        for phase, rows in curves.items():
            writer.writerows((step, f"{phase}/{name}", f"{value:.6g}") for step, name, value in rows)
