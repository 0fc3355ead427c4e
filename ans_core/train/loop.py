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
    VALIDATION_LOSS,
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
    and end. A state is then on disk when the next batch is asked for; else a thread may still write it."""

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


class _InPrecision(nn.Module):
    """A loss module that opens its autocast itself: DeepSpeed's engine turns off one that is open around it."""

    def __init__(self, module: nn.Module, machine: Machine) -> None:
        super().__init__()
        self.module, self.machine = module, machine

    def forward(self, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        with self.machine.autocast():
            loss, metrics = self.module(batch)
        return loss, metrics


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
    wrapped, optimizer = accelerator.prepare(_InPrecision(loss_module, machine), optimizer)
    folder = scratch / name
    start, curves = states.resume(
        folder,
        loss_module,
        optimizer,
        wrapped,
        deepspeed_stage=machine.deepspeed_stage,
        device=machine.device,
    )
    loader = DataLoader(
        _Steps(make_batch, start, schedule),
        batch_size=None,
        num_workers=machine.workers,
        shuffle=False,
        # `make_batch` is a closure, which no other way of starting takes along
        multiprocessing_context="fork" if machine.workers else None,
        worker_init_fn=stop.ignore_signals,
        pin_memory=machine.device.type == "cuda",
    )
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
        run = _Run(
            module=loss_module,
            wrapped=wrapped,
            optimizer=optimizer,
            accelerator=accelerator,
            batches=batches,
            name=name,
            schedule=schedule,
            machine=machine,
            folder=folder,
            curves=curves,
            writer=writer,
            log=log,
            watch=watch or Watch(),
        )
        run.measure_at_start(start)
        for step in bar:
            if run.exhausted:
                break
            step_begins()
            seed_everything(seed, name, step, rank())
            metrics, diagnostics = run.update(step)
            if after_step is not None and not metrics["skipped"]:
                metrics |= shared_means([after_step(step)])
            run.record(step, metrics | run.measured(step), diagnostics)
            bar.set_postfix_str(f"loss {metrics['loss']:.3f}")
            ending = run.ending(step)
            if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps or run.exhausted or ending:
                check_same_gradient(name, step, metrics["grad_norm"], machine.device)
                run.save(step)
            step_profiled()
            if ending:
                writer.wait()
                # a launcher ends the others soon after the first process that ends, and the first one writes
                # the state
                wait_for_all()
                raise stop.Stopped(ending, step + 1)
    if run.best is not None:
        states.load_weights(states.best_file(folder, run.best), run.best, loss_module, device=machine.device)
    accelerator.free_memory()
    return curves


@dataclass(kw_only=True)
class _Run:
    """What the steps of one training share."""

    module: nn.Module
    wrapped: Any
    """The module as accelerate runs it: in DDP or DeepSpeed's engine where there are several processes."""
    optimizer: Any
    accelerator: Accelerator
    batches: Iterator[Any]
    name: str
    schedule: Schedule
    machine: Machine
    folder: Path
    curves: Curves
    writer: states.Writer
    log: Log
    watch: Watch
    skipped: int = 0
    """Steps in a row, up to the last one, with a loss or gradient that is not finite."""

    def __post_init__(self) -> None:
        self.speed, self.graphs = Speed(self.watch), GraphWatch()
        self._look_back()

    def measure_at_start(self, start: int) -> None:
        """Validate before the first step, where that is asked for."""
        validation = self.watch.validation
        if validation is not None and validation.at_start and not start:
            self._write(START, {f"val/{key}": value for key, value in validation.measure().items()}, {})

    def measured(self, step: int) -> dict[str, float]:
        """Return the validation's metrics, in steps that are due for it."""
        validation = self.watch.validation
        if validation is None or not validation.due(step + 1, self.schedule.steps):
            return {}
        return {f"val/{key}": value for key, value in validation.measure().items()}

    def _look_back(self) -> None:
        """Find the step with the best weights so far, and whether the last validations brought nothing. The curves
        of a long run have a million rows, so this is done after validations alone."""
        validation = self.watch.validation
        self.best = None if validation is None else validation.best(self.curves)
        self.exhausted = validation is not None and validation.exhausted(self.curves)

    def update(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Take one optimizer step. Return (the loss and means over the micro-batches of all processes that have
        the value; speed, norms and learning rate, for the log alone).

        DeepSpeed divides, clips and steps inside `backward`, and skips a step whose gradient is not finite.
        Raises RuntimeError where such steps are to end the run.
        """
        factor = lr_factor(step, steps=self.schedule.steps, warmup=self.schedule.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr * group["scale"] * factor
        self.speed.clear()
        micros, micro_metrics = self._backward()
        diagnostics: dict[str, float] = {}
        if self.machine.deepspeed_stage:
            totals = shared_means(micro_metrics)
            norm = self.wrapped.get_global_grad_norm()
            totals["grad_norm"] = math.nan if norm is None else float(norm)
            finite = math.isfinite(totals["grad_norm"])
        else:
            norms = gradient_norms(self.module, self.watch.part_of)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            norms["grad_norm"] = self.accelerator.clip_grad_norm_(parameters, self.schedule.clip_grad)
            # the one time that a step waits for its device
            *micro_metrics, diagnostics = read_together([*micro_metrics, norms])
            totals = shared_means(micro_metrics) | {"grad_norm": diagnostics.pop("grad_norm")}
            finite = math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad()
        diagnostics |= self.speed.metrics(self.machine.device) | {"lr": self.schedule.lr * factor}
        self.skipped = 0 if finite else self.skipped + 1
        if not finite:
            self._skip(step, totals, self._spoiled(micros, micro_metrics))
        return totals | {"skipped": float(not finite)}, diagnostics

    def _backward(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """Add up the gradients of a step. Return its micro-batches, and loss and metrics of each."""
        schedule, machine = self.schedule, self.machine
        micro_metrics: list[dict[str, Any]] = []
        micros = [self.speed.take(self.batches) for _ in range(schedule.accumulate)]
        parts = 1
        if isinstance(self.module, StepModule):
            # undoes two means: accelerate's, and that of DDP or DeepSpeed
            parts = schedule.accumulate * world_size()
            with machine.autocast():
                micros = self.module.begin_step(micros)
        for batch in micros:
            with self.accelerator.accumulate(self.wrapped):
                loss, metrics = self.wrapped(batch.to(machine.device))
                loss = loss * parts
                micro_metrics.append({"loss": loss.detach(), **metrics})
                if machine.deepspeed_stage:
                    # so that no gradient of an infinite loss is finite
                    loss = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)
                self.accelerator.backward(loss)  # divides by the number of micro-batches
        return micros, micro_metrics

    def _spoiled(self, micros: Sequence[Any], micro_metrics: Sequence[Mapping[str, Any]]) -> str:
        """Name what spoiled the first of this process's micro-batches with a non-finite loss; the empty string
        where it is not known. Under ZeRO-3 a process can't run alone."""
        broken = [
            batch
            for batch, values in zip(micros, micro_metrics, strict=True)
            if not math.isfinite(float(values["loss"]))
        ]
        if not broken or not self.watch.runs_again or self.machine.deepspeed_stage == 3:
            return ""
        with self.machine.autocast():
            return first_spoiled(self.module, broken[0].to(self.machine.device))

    def _skip(self, step: int, metrics: Mapping[str, float], spoiled: str) -> None:
        """Write down what a skipped step learned from, and say which module spoiled it."""
        rows = self.watch.rows(step) if self.watch.rows is not None else ()
        path = note_skipped(self.folder, step, metrics, rows, spoiled)
        where = f"{spoiled} is the first module with a non-finite output; " if spoiled else ""
        if self.machine.halt_on_nan:
            raise RuntimeError(
                f"{self.name}: loss {metrics['loss']:g} and gradient norm {metrics['grad_norm']:g} at step "
                f"{step} are not both finite, and launch.halt_on_nan is set; {where}{path} names the rows"
            )
        if self.skipped > MAX_SKIPPED:
            raise RuntimeError(
                f"{self.name}: {self.skipped} steps in a row had a non-finite loss or gradient, the last is "
                f"step {step}; lower the learning rate; {where}{path} names the rows"
            )
        if spoiled:
            tqdm.write(f"{self.name}: step {step} is skipped: {where}{path} names the rows")

    def record(self, step: int, metrics: dict[str, float], diagnostics: dict[str, float]) -> None:
        """Add a step to the curves and the log, and keep its weights where they are the best, or due."""
        if self.machine.compile:
            diagnostics |= self.graphs.metrics(step)
        self._write(step, metrics, diagnostics | self.writer.metrics())
        if VALIDATION_LOSS in metrics:
            self._look_back()
            if self.best == step:
                self.writer.save_weights(states.best_file(self.folder, step), step, self.module)
        if self.schedule.keep_every and (step + 1) % self.schedule.keep_every == 0:
            self.writer.save_weights(states.step_file(self.folder, step + 1), step + 1, self.module)

    def _write(self, step: int, metrics: dict[str, float], diagnostics: dict[str, float]) -> None:
        self.curves += [(step, key, value) for key, value in metrics.items()]
        if rank() == 0:
            self.log({f"{self.name}/{key}": value for key, value in (metrics | diagnostics).items()}, step)

    def ending(self, step: int) -> int:
        """Return the signal by which all processes end after this step; 0 for none. It reaches them at different
        steps: the largest number of all decides."""
        if self.machine.ends_at_once or (step + 1) % self.schedule.save_unit:
            return 0
        return largest(stop.requested(), self.machine.device)

    def save(self, step: int) -> None:
        """Write the state after a step."""
        self.writer.save(
            self.folder,
            step + 1,
            self.module,
            self.optimizer,
            self.wrapped,
            self.curves,
            best=self.best,
            deepspeed_stage=self.machine.deepspeed_stage,
            keep=self.machine.keep_states,
        )
        if self.machine.ends_at_once:
            self.writer.wait()
        if world_size() > 1 and rank() == 0:
            logging.info("%s", self.speed.table())


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


def write_curves(path: Path, curves: Mapping[str, Curves]) -> None:
    """Write curves.csv with columns step, name, value; names are `<phase>/<name>`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "name", "value"))
        for phase, rows in curves.items():
            writer.writerows((step, f"{phase}/{name}", f"{value:.6g}") for step, name, value in rows)
