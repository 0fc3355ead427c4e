"""What is looked at while a training runs: validation, speed, gradient norms by part, skipped steps and a
profile. None of it is needed to learn."""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import resource
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pynvml
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import profile
from torch.profiler import schedule as profiler_schedule
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from ans_core.dist import largest, rank, shared_mean, shared_sum, union, world_size
from ans_core.train.states import Curves

VALIDATION_LOSS = "val/loss"
START = -1
"""In curves, the step of what was measured before the first."""
OPERATIONS = "operations"
"""Among a batch's counts: floating point operations, without those of layers that are computed again."""
SAME_GRADIENT = 1e-3
"""Difference of a gradient's norm between processes, relative to it, that rounding can make."""
HANG_S = 600.0
"""A step that takes longer is taken to hang: as long as NCCL waits for a process."""
STDERR = 2
"""Its file descriptor."""
MOST_GRAPHS = 16
"""That torch.compile makes in a run at most, rows of all lengths: SFT needs some 4, RL with its three
adapters some 8; half as many more where some layers are computed again and others not."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A measure of held-out data during training. The weights with the lowest `loss` are those that the
    training ends with."""

    every: int
    """Steps."""
    measure: Callable[[], dict[str, float]]
    """Returns `loss` and other metrics, the same on all processes; all of them call it."""
    patience: int = 0
    """The training ends after this many validations in a row without a lower loss; 0 = never."""
    at_start: bool = False
    """Whether the model is also measured before the first step, for comparison (START)."""

    def due(self, done: int, steps: int) -> bool:
        return done % self.every == 0 or done == steps

    def best(self, curves: Curves) -> int | None:
        """Return the trained step with the lowest loss so far, the first of equals; None before the first
        validation with a finite one."""
        losses = [
            (value, step)
            for step, name, value in curves
            if name == VALIDATION_LOSS and math.isfinite(value) and step != START
        ]
        return min(losses)[1] if losses else None

    def exhausted(self, curves: Curves) -> bool:
        """Tell whether the last `patience` validations brought nothing."""
        best = self.best(curves)
        later = [
            step for step, name, _ in curves if name == VALIDATION_LOSS and best is not None and step > best
        ]
        return bool(self.patience) and len(later) >= self.patience


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a stage tells the loop about its batches and its model."""

    validation: Validation | None = None
    rows: Callable[[int], Sequence[str]] | None = None
    """Step -> names of what this process learns from in it."""
    counts: Callable[[Any], Mapping[str, float]] | None = None
    """Batch -> what is counted per second: rows, tokens, operations (OPERATIONS)."""
    peak_flops: float | None = None
    """Most operations a second that a GPU can do; None where it is not known, and on a CPU."""
    part_of: Callable[[str], str] | None = None
    """Name of a parameter -> the part of the model whose gradient norm it counts in. Not known under
    DeepSpeed, which keeps no gradient."""
    runs_again: bool = False
    """Whether a micro-batch with a non-finite loss may run forward once more, so that the module that spoils
    it is named."""


class Speed:
    """How long steps take, how much of it is waiting for data, and which share of the GPUs' peak is used."""

    def __init__(self, watch: Watch) -> None:
        self.counts, self.peak_flops = watch.counts, watch.peak_flops
        self.steps, self.sums = 0, torch.zeros(3, world_size(), dtype=torch.float64)
        """Since the last table: steps; by process the seconds of its steps, those that it waited for data, and
        its GPU's loads, all summed."""
        self.hosts = union({rank(): socket.gethostname()})
        self.clear()

    def clear(self) -> None:
        self.began, self.waited, self.done = time.perf_counter(), 0.0, defaultdict[str, float](float)

    def take(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, and remember how long it took to come."""
        began = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - began
        if self.counts is not None:
            for name, count in self.counts(batch).items():
                self.done[name] += count
        return batch

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return this step's numbers: counts of all processes, how long the slowest and the median one took,
        which one waited longest for its data, and whose GPU is least at work; waiting and memory of this one.
        All processes must call it."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds, processes = time.perf_counter() - self.began, world_size()
        names = sorted(self.done)
        local_sums = torch.zeros(len(names) + 3 * processes, dtype=torch.float64)
        local_sums[: len(names)] = torch.tensor([self.done[name] for name in names], dtype=torch.float64)
        # each process has places of its own, so their sum has the values of all
        of_this = (seconds, self.waited, gpu_utilization(device) if processes > 1 else math.nan)
        local_sums[len(names) + rank() :: processes] = torch.tensor(of_this, dtype=torch.float64)
        summed = shared_sum(local_sums, device)
        totals = dict(zip(names, summed.tolist(), strict=False))
        of_processes = summed[len(names) :].view(3, processes)
        times, waits, loads = of_processes.tolist()
        self.sums += of_processes
        self.steps += 1
        operations = totals.pop(OPERATIONS, 0.0)
        numbers = {f"speed/{name}_per_s": total / seconds for name, total in totals.items()}
        if "tokens" in totals:
            numbers["speed/tokens_per_s_per_process"] = totals["tokens"] / seconds / processes
        if self.peak_flops and operations:
            numbers["speed/mfu"] = operations / seconds / processes / self.peak_flops
        if processes > 1:
            numbers |= {
                "speed/slowest_step_s": max(times),
                "speed/slowest_process": float(times.index(max(times))),
                "speed/median_step_s": median(times),
                "speed/longest_wait_for_data_s": max(waits),
                "speed/median_wait_for_data_s": median(waits),
                "speed/longest_waiting_process": float(waits.index(max(waits))),
            }
            if not any(map(math.isnan, loads)):
                numbers |= {
                    "speed/lowest_gpu_utilization": min(loads),
                    "speed/median_gpu_utilization": median(loads),
                    "speed/lowest_gpu_utilization_process": float(loads.index(min(loads))),
                }
        numbers |= {
            "speed/waiting_for_data": self.waited / seconds,
            "speed/step_s": seconds,
            "peak_memory_mb": peak_memory_mb(device),
        }
        self.clear()
        return numbers

    def table(self) -> str:
        """Return a line for each process with means since the last table: the host, seconds of a step, of them
        waiting for data, and the GPU's load. The slowest process waits for nobody: look for a long wait for
        data, or for the one GPU that is less, or more, at work than the others."""
        means = (self.sums / max(1, self.steps)).T.tolist()
        rows = [
            f"{number:5} {self.hosts[number]:20} {step_s:9.3f} {waited_s:9.3f} {load:9.2f}"
            for number, (step_s, waited_s, load) in enumerate(means)
        ]
        lines = [
            f"{self.steps} steps by process",
            " rank host                    step s    wait s  GPU load",
            *rows,
        ]
        self.steps = 0
        self.sums.zero_()
        return "\n".join(lines)


def gpu_utilization(device: torch.device) -> float:
    """Return the share of the last moment (1/6 to 1 s) in which a GPU computed, as NVIDIA's driver tells; waiting
    for another GPU in NCCL counts. NaN where it does not tell, as in a part of a GPU (MIG), and on a CPU."""
    if device.type != "cuda":
        return math.nan
    try:
        return torch.cuda.utilization(device) / 100
    except (pynvml.NVMLError, RuntimeError, ModuleNotFoundError):  # the last: an AMD GPU
        return math.nan


@contextmanager
def hang_watch() -> Iterator[Callable[[], None]]:
    """Yield what a step is to call as it begins. If the next one does not begin within HANG_S, the stacks of
    this process's threads are written to its log file: they say who waits for whom. SIGUSR2 writes them at
    once."""
    handlers = logging.getLogger().handlers
    logs = [one.stream.fileno() for one in handlers if isinstance(one, logging.FileHandler) and one.stream]
    file = logs[0] if logs else STDERR

    def begin() -> None:
        faulthandler.dump_traceback_later(HANG_S, file=file)

    faulthandler.register(signal.SIGUSR2, file=file)
    try:
        yield begin
    finally:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR2)


def compiled_graphs() -> dict[str, float]:
    """Return how many graphs torch.compile has made in this process, and how often code that it can't read
    broke one."""
    return {
        "compile/graphs": float(counters["stats"]["unique_graphs"]),
        "compile/breaks": float(sum(counters["graph_break"].values())),
    }


class GraphWatch:
    """Tells once, on the terminal, that a run compiles more graphs than it should."""

    def __init__(self) -> None:
        self.warned = False

    def metrics(self, step: int) -> dict[str, float]:
        """Return `compiled_graphs` after a step."""
        counts = compiled_graphs()
        if counts["compile/graphs"] > MOST_GRAPHS and not self.warned and rank() == 0:
            self.warned = True
            tqdm.write(
                f"{counts['compile/graphs']:.0f} graphs were compiled by step {step}; {MOST_GRAPHS} are "
                "expected in a whole run."
                " TORCH_LOGS=recompiles says why each was made; launch.compile=none runs without"
            )
        return counts


def peak_memory_mb(device: torch.device) -> float:
    """Return the most memory that this process has held so far: on the GPU, or resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def gradient_norms(module: nn.Module, part_of: Callable[[str], str] | None) -> dict[str, Tensor]:
    """Return `grad_norm/<part>` of every part with a gradient, before clipping, where the gradients are."""
    if part_of is None:
        return {}
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, p in module.named_parameters():
        if p.grad is not None:
            parts[part_of(name)].append(p.grad)
    return {
        f"grad_norm/{part}": torch.stack(torch._foreach_norm(grads)).norm()
        for part, grads in sorted(parts.items())
    }


def check_same_gradient(name: str, step: int, norm: float, device: torch.device) -> None:
    """Raise RuntimeError if the gradient of this step differs between processes by more than rounding: each
    would train a model of its own, and only the first one's is kept. All processes must call it."""
    mean = shared_mean(norm, device)
    if largest(int(abs(norm - mean) > SAME_GRADIENT * mean), device):
        raise RuntimeError(
            f"{name}: at step {step} the gradient has norm {norm:g} on process {rank()}, and {mean:g} on "
            "average: the processes don't share their gradients. Something has taken the hooks off the "
            "trained parameters; start again with one process, and report it"
        )


def note_skipped(
    folder: Path, step: int, metrics: Mapping[str, float], rows: Sequence[str], spoiled: str
) -> Path:
    """Add a line about a skipped step to this process's file, and return the file. `spoiled`: of
    `first_spoiled`."""
    path = folder / f"skipped-{rank()}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    # JSON has no NaN
    numbers = {name: str(metrics[name]) for name in ("loss", "grad_norm") if name in metrics}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **numbers, "module": spoiled, "rows": list(rows)}) + "\n")
    return path


@torch.no_grad()
def first_spoiled(module: nn.Module, batch: Any) -> str:
    """Run a micro-batch forward once more and return the name of the first module with an output that is not
    finite; the empty string where every module's is, as when the loss itself overflows. Dropout differs from
    the first time."""
    spoiled: list[str] = []

    def looks_at(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [
                leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ]
            if not spoiled and not all(bool(tensor.isfinite().all()) for tensor in tensors):
                spoiled.append(name)

        return look

    # An inner module ends before the one around it, so the first is the innermost.
    handles = [inner.register_forward_hook(looks_at(name)) for name, inner in module.named_modules() if name]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code would compile the hooks
            module(batch)
    finally:
        for handle in handles:
            handle.remove()
    return spoiled[0] if spoiled else ""


@contextmanager
def profiled(path: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after every step; write a trace of `steps` steps after the first two. 0:
    none."""
    if not steps:
        yield lambda: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = profiler_schedule(wait=1, warmup=1, active=steps, repeat=1)
    with profile(
        schedule=plan, on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)), profile_memory=True
    ) as profiler:
        yield profiler.step
