"""Check before a run whether this machine can do what params.yaml asks for: GPUs, memory, disk, weights, data."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ans_core.config import PROFILES, Config, read_yaml

if TYPE_CHECKING:
    from ans_core.model.needs import Needs

GB = 1e9
TINY_BYTES = 6 * GB
"""Memory of the profiles that train from zero."""
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    ok: bool
    what: str
    remedy: str = ""


def preflight(config: Config, root: Path) -> list[Finding]:
    """Return findings about GPUs, memory, disk, weights and data. Nothing is downloaded."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    need = published_needs(config, root)
    findings = [gpu_count(config, [gpu.name for gpu in gpus])]
    if need and gpus:
        findings.append(gpu_memory(config, need, min(gpu.total_memory for gpu in gpus)))
    wanted = need.base if need else TINY_BYTES
    available = psutil.virtual_memory().available
    memory = f"{available / GB:.1f} GB of memory available, {wanted / GB:.1f} GB are needed to load the model"
    findings.append(Finding(ok=available >= wanted, what=memory, remedy="end other programs, or take a larger machine"))
    if need:
        findings.append(disk(config, need, shutil.disk_usage(root).free))
    return [*findings, *weights(config, root), data(config, root)]


def published_needs(config: Config, root: Path) -> Needs | None:
    """Return the needs of a published size, known by the profile's name or by its base; None for others."""
    if config.base.source != "published":
        return None
    from ans_core.checkpoints.published import PUBLISHED, build_meta
    from ans_core.model.needs import needs

    def base_of(name: str) -> str | None:
        path = root / PROFILES / f"{name}.yaml"
        return read_yaml(path).values.get("base", {}).get("internvl") if path.exists() else None

    names = [name for name in PUBLISHED if name == config.profile.removesuffix("-rl") or base_of(name) == config.base.internvl]
    return needs(build_meta(names[0]), rank=config.sft.lora.rank, gpus=config.launch.processes) if names else None


def gpu_count(config: Config, gpus: list[str]) -> Finding:
    nodes = int(os.environ.get("PET_NNODES", "1"))
    wanted = max(config.launch.processes // nodes, config.launch.inference_processes) if config.launch.device == "cuda" else 0
    if config.base.source == "published" and config.launch.device == "auto":
        wanted = max(wanted, 1)
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"
    asked = f"; {config.profile} asks for {wanted} on this machine" if wanted else ""
    return Finding(
        ok=len(gpus) >= wanted,
        what=f"GPUs: {counted}{asked}",
        remedy=f"set launch.processes and launch.inference_processes to {len(gpus)}"
        if gpus
        else "run on a machine with GPUs whose driver `nvidia-smi` shows",
    )


def gpu_memory(config: Config, need: Needs, has: int) -> Finding:
    """Compare weights, gradients and optimizer with the smallest GPU. Activations come on top (docs/full-size.md)."""
    wanted = {0: need.plain, 3: need.per_gpu_zero3}.get(config.launch.deepspeed_stage, need.per_gpu)
    return Finding(
        ok=wanted <= has,
        what=f"{wanted / GB:.0f} GB of each GPU's {has / GB:.0f} GB for weights and optimizer, the rest for activations",
        remedy="launch.deepspeed_stage=3 divides the weights among the GPUs, too, for sft alone; or more GPUs, or a smaller profile",
    )


def disk(config: Config, need: Needs, free: int) -> Finding:
    """Base and converted model are written once and copied into DVC's cache; so are the deltas of SFT and RL; states replace each other."""
    wanted = 4 * need.base + 4 * need.delta + config.launch.keep_states * need.training_state
    return Finding(
        ok=wanted <= free,
        what=f"{free / GB:.0f} GB of disk free, results and training states need about {wanted / GB:.0f} GB",
        remedy="`dvc gc -w --all-commits` drops results that no commit names; or a larger disk",
    )


def weights(config: Config, root: Path) -> list[Finding]:
    """Look for the base's weights: a folder, a file, or the hub's cache."""
    if config.base.source == "scratch":
        return []
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    findings = []
    for key in ("internvl", "sam2"):
        if not (name := getattr(config.base, key)) or (root / name).exists():
            continue
        try:
            snapshot_download(name, local_files_only=True)
        except (LocalEntryNotFoundError, ValueError):
            remedy = f"`ans weights fetch` lists names and where they go; or `hf download {name}`, into the hub's cache"
            findings.append(Finding(ok=False, what=f"base.{key}: {name} is neither on this disk nor in the hub's cache", remedy=remedy))
    return findings or [Finding(ok=True, what="the base's weights are there")]


def data(config: Config, root: Path) -> Finding:
    sources = [*config.prepare.sources, *config.evaluate.sources]
    lacking = [f"{source.name} ({source.path})" for source in sources if not (root / source.path).exists()]
    of_agent = {name: getattr(config.agent.sft, name) for name in ("traces", "lora_ranks_from")}
    lacking[:0] = [f"agent.sft.{name} ({path})" for name, path in of_agent.items() if path and not (root / path).exists()]
    if not lacking:
        return Finding(ok=True, what=f"{len(sources)} data sets of params.yaml are there")
    more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
    return Finding(
        ok=False,
        what=f"data sets that are not there: {', '.join(lacking[:SHOWN])}{more}",
        remedy="`ans data fetch` lists names that can be had; or correct the paths in params.yaml",
    )
