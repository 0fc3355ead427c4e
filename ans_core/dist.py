"""Seeds, ranks and threads: what makes a run the same wherever it runs."""

from __future__ import annotations

import hashlib
import os
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch


def seed_of(*parts: object) -> int:
    """A seed for anything random, a function of (run seed, step, sample, ...) alone: rank count and resuming do not change results."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def rng_of(*parts: object) -> random.Random:
    return random.Random(seed_of(*parts))


def seed_everything(*parts: object) -> None:
    """Python's, NumPy's and torch's global generators: libraries draw from them."""
    seed = seed_of(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def shared_sum(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Over all processes, the same on each; one alone gets its values back. All of them must call it. `device`: the model's, since NCCL
    knows no other; the sum is where the values were."""
    if world_size() == 1:
        return values
    total = values.to(device, copy=True)
    torch.distributed.all_reduce(total)
    return total.to(values.device)


def shared_mean(value: float, device: torch.device) -> float:
    """As `shared_sum`."""
    return float(shared_sum(torch.tensor(value, dtype=torch.float64), device)) / world_size()


def shared_means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every name over the mappings that have it, those of all processes together: the same on each. All of them must call it."""
    found: list[Sequence[Mapping[str, float]]] = [values] * world_size()
    if world_size() > 1:
        torch.distributed.all_gather_object(found, values)
    every: dict[str, list[float]] = defaultdict(list)
    for own in found:
        for mapping in own:
            for name, value in mapping.items():
                every[name].append(value)
    return {name: sum(some) / len(some) for name, some in every.items()}


def wait_for_all() -> None:
    """Return once every process is here. All of them must call it."""
    if world_size() > 1:
        torch.distributed.barrier()


def pick_device(name: str) -> torch.device:
    """auto = this process's GPU when there is one. Raises RuntimeError when a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("launch.device is cuda but torch sees no GPU; set launch.device=auto or cpu, or see `ans doctor`")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def deterministic(on: bool) -> None:
    """Same bits on the same machine. On CPU they are the same anyway; on a GPU this costs speed."""
    if on and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
