"""Seeds, ranks and threads: what makes a run's results the same on every machine."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ans_core.progress import bar_interval_s

Metrics = dict[str, float | Tensor]
"""Numbers by name, or tensors of one value that nobody has waited for."""
S = TypeVar("S")
T = TypeVar("T")
FEISTEL_ROUNDS = 8
LONGEST_WAIT = timedelta(days=7)
"""Of the first process that is done for the last."""


def seed_of(*parts: object) -> int:
    """Return a seed for anything random, a function of (run seed, step, sample, ...) alone: rank count and
    resuming don't change results."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def rng_of(*parts: object) -> random.Random:
    return random.Random(seed_of(*parts))


def permuted(place: int, count: int, *seed: object) -> int:
    """Return what stands at `place` of a random order of range(count), which the seed alone decides. The order
    itself is never made, so an epoch of any size costs nothing.

    A Feistel network over pairs of numbers, walked until it leads into the range: the generalized Feistel
    cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002)."""
    key = seed_of(*seed).to_bytes(8, "big")
    width = math.isqrt(count - 1) + 1
    sizes = width, -(-count // width)
    while True:
        halves = list(divmod(place, sizes[1]))
        for turn in range(FEISTEL_ROUNDS):
            side = turn % 2
            text = f"{turn} {halves[1 - side]}".encode()
            digest = hashlib.blake2b(text, digest_size=8, key=key).digest()
            halves[side] = (halves[side] + int.from_bytes(digest, "big")) % sizes[side]
        place = halves[0] * sizes[1] + halves[1]
        if place < count:
            return place


def in_epochs(number: int, count: int, *seed: object) -> int:
    """Return element `number` of random orders of range(count), one after the other."""
    epoch, place = divmod(number, count)
    return permuted(place, count, *seed, epoch)


def seed_everything(*parts: object) -> None:
    """Seed the global generators of Python, NumPy and torch, which libraries draw from."""
    seed = seed_of(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def shared_sum(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Sum over all processes; each gets the same result, and a single process gets its values back. All
    processes must call it. `device`: the model's, which NCCL needs; the result is on the device of
    `values`."""
    if world_size() == 1:
        return values
    total = values.to(device, copy=True)
    torch.distributed.all_reduce(total)
    return total.to(values.device)


def largest(value: int, device: torch.device) -> int:
    """Return the largest value of any process. All processes must call it."""
    if world_size() == 1:
        return value
    maximum = torch.tensor([value], device=device)
    torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX)
    return int(maximum)


def shared_mean(value: float, device: torch.device) -> float:
    """Average over all processes, as `shared_sum` sums."""
    return float(shared_sum(torch.tensor(value, dtype=torch.float64), device)) / world_size()


def shared_means(values: Sequence[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Average every name over those mappings of all processes that have it; each process gets the same
    result. Tensors of one value are read from their device together. All processes must call it."""
    values = read_together(values)
    per_rank = [values] * world_size()
    if world_size() > 1:
        torch.distributed.all_gather_object(per_rank, values)
    every: dict[str, list[float]] = defaultdict(list)
    for rank_values in per_rank:
        for mapping in rank_values:
            for name, value in mapping.items():
                every[name].append(value)
    return {name: sum(some) / len(some) for name, some in every.items()}


def read_together(values: Sequence[Mapping[str, float | Tensor]]) -> list[dict[str, float]]:
    """Return the mappings with numbers in place of tensors of one value: however many, the host waits once
    for each device and dtype."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for value in chain.from_iterable(mapping.values() for mapping in values):
        if isinstance(value, Tensor):
            alike[value.device, value.dtype].append(value)
    numbers = {kind: iter(torch.stack(tensors).tolist()) for kind, tensors in alike.items()}
    return [
        {
            name: next(numbers[v.device, v.dtype]) if isinstance(v, Tensor) else v
            for name, v in mapping.items()
        }
        for mapping in values
    ]


def own_share(items: Sequence[S], *, micro: int, micros: int) -> Sequence[S]:
    """Return this process's part, in one micro-batch, of what all processes and micro-batches do together."""
    return items[micro * world_size() + rank() :: micros * world_size()]


def union(values: Mapping[int, T]) -> dict[int, T]:
    """Return what all processes have, by key; each gets the same. All processes must call it."""
    per_rank = [values] * world_size()
    if world_size() > 1:
        torch.distributed.all_gather_object(per_rank, values)
    return {key: value for rank_values in per_rank for key, value in rank_values.items()}


def by_turns(
    items: Sequence[S], batch: int, make: Callable[[Sequence[S]], Iterable[T]], *, desc: str | None = None
) -> list[T]:
    """Return what `make` makes of each item, in their order. It is called on `batch` items at a time; this
    process calls it on every n-th batch and gets the rest from the others. Which items share a batch does not
    depend on the number of processes. All processes must call it with the same items; each gets the same
    results, which must pickle. desc: of the first process's progress bar; None shows none."""
    local: dict[int, T] = {}
    turns = range(rank() * batch, len(items), world_size() * batch)
    for start in tqdm(turns, desc=desc, disable=desc is None or rank() > 0, mininterval=bar_interval_s()):
        some = items[start : start + batch]
        local.update(zip(range(start, start + len(some)), make(some), strict=True))
    merged = union(local)
    return [merged[number] for number in range(len(items))]


@contextmanager
def process_group() -> Iterator[None]:
    """Let processes that only wait for each other and exchange objects talk: gloo, for GPUs too. Does nothing
    for a single one."""
    if world_size() == 1:
        yield
        return
    torch.distributed.init_process_group("gloo", timeout=LONGEST_WAIT)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


OF_MANY = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that tell a process, accelerate and DeepSpeed that there are others."""


@contextmanager
def alone() -> Iterator[None]:
    """Let this process work as the only one: what it makes is its own."""
    taken = {name: os.environ.pop(name) for name in OF_MANY if name in os.environ}
    try:
        yield
    finally:
        os.environ |= taken


def wait_for_all() -> None:
    """Return once every process is here, however long that takes. All of them must call it."""
    if world_size() > 1:
        torch.distributed.barrier(_patient_group(torch.distributed.group.WORLD))


def after_the_first(work: Callable[[], object]) -> None:
    """Let the first process do something for all; return once it is done. All of them must call it."""
    if rank() == 0:
        work()
    wait_for_all()


def of_the_first(make: Callable[[], T]) -> T:
    """Return what the first process makes; the others wait for it, however long. All of them must call it."""
    made: list[Any] = [make() if rank() == 0 else None]
    if world_size() > 1:
        group = _patient_group(torch.distributed.group.WORLD)
        torch.distributed.broadcast_object_list(made, src=0, group=group)
    return made[0]


@functools.lru_cache(maxsize=1)
def _patient_group(world: object) -> Any:
    """Return a group of all processes that waits for the last one, where NCCL's end the run after ten minutes;
    one for each default group (`world`). All processes must call it."""
    return torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)


def pick_device(name: str) -> torch.device:
    """Return the device; auto = this process's GPU if there is one. Raises RuntimeError if a GPU is required
    and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "launch.device is cuda but torch sees no GPU; set launch.device=auto or cpu, or see `ans doctor`"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def deterministic(on: bool) -> None:
    """Turn torch's deterministic kernels on or off for this process: the same bits each time on the same
    machine.

    Without them the gradient of indexing (`table[places]`) is summed by several threads in any order, on a
    CPU as on a GPU.
    """
    if on and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(on, warn_only=True)
    # else each `torch.empty` is filled: a guard for programs that read what they have not written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
