"""Check before a run whether this machine can do what params.yaml asks for: GPUs, memory, disk, weights,
data."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ans_core.config import PROFILES, Config, read_yaml
from ans_core.processes import memory_limit

if TYPE_CHECKING:
    from ans_core.model.footprint import Parameters
    from ans_core.model.network import Network

GB = 1e9
TINY_BYTES = 6 * GB
"""Memory of the profiles that train from zero."""
SHOWN = 5
GPU_GB = 80
"""Memory of each GPU of the machine that a full-size profile is made for."""
LARGER_GPUS_GB = {"sa2va-26b": 141}
"""The same, of profiles that need more."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    ok: bool
    what: str
    remedy: str


def fine(what: str) -> Finding:
    return Finding(ok=True, what=what, remedy="")


def fault(what: str, remedy: str) -> Finding:
    return Finding(ok=False, what=what, remedy=remedy)


def preflight(config: Config, root: Path) -> list[Finding]:
    """Return findings about GPUs, memory, disk, weights and data. Nothing is downloaded."""
    import psutil
    import torch

    from ans_core.checkpoints.published import build_meta
    from ans_core.model.footprint import parameters_of

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    name = published_name(config, root)
    model = build_meta(name) if name else None
    counts = parameters_of(model, rank=config.sft.lora.rank) if model else None
    findings = [gpu_count(config, [gpu.name for gpu in gpus])]
    if name and model:
        has = min(
            (gpu.total_memory for gpu in gpus), default=int(GB * LARGER_GPUS_GB.get(config.profile, GPU_GB))
        )
        findings += [*gpu_memory(config, model, has), shared_memory(config, model)]
        if config.agent.tiles or config.agent.max_pixels:  # as the profiles of agents have them
            findings.append(agent_memory(config, build_meta(name), has))
    wanted = counts.base if counts else TINY_BYTES
    available = min(psutil.virtual_memory().available, memory_limit())
    memory = f"{available / GB:.1f} GB of memory available, {wanted / GB:.1f} GB are needed to load the model"
    findings.append(
        Finding(ok=available >= wanted, what=memory, remedy="end other programs, or take a larger machine")
    )
    if counts:
        findings.append(disk(config, counts, shutil.disk_usage(root).free))
    return [*findings, *weights(config, root), data(config, root)]


def published_name(config: Config, root: Path) -> str | None:
    """Return the published size that a profile trains, known by the profile's name or by its base; None for
    others."""
    if config.base.source != "published":
        return None
    from ans_core.checkpoints.published import PUBLISHED

    def base_of(name: str) -> str | None:
        path = root / PROFILES / f"{name}.yaml"
        return read_yaml(path).values.get("base", {}).get("internvl") if path.exists() else None

    names = (
        name
        for name in PUBLISHED
        if name == config.profile.removesuffix("-rl") or base_of(name) == config.base.internvl
    )
    return next(names, None)


def gpu_count(config: Config, gpus: list[str]) -> Finding:
    nodes = int(os.environ.get("PET_NNODES", "1"))
    wanted = (
        max(config.launch.processes // nodes, config.launch.inference_processes)
        if config.launch.device == "cuda"
        else 0
    )
    if config.base.source == "published" and config.launch.device == "auto":
        wanted = max(wanted, 1)
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"
    request = f"; {config.profile} asks for {wanted} on this machine" if wanted else ""
    return Finding(
        ok=len(gpus) >= wanted,
        what=f"GPUs: {counted}{request}",
        remedy=f"set launch.processes and launch.inference_processes to {len(gpus)}"
        if gpus
        else "run on a machine with GPUs whose driver `nvidia-smi` shows",
    )


def gpu_memory(config: Config, model: Network, has: int) -> list[Finding]:
    """Compare what the training stages of a model hold on each GPU with the smallest GPU's bytes."""
    from ans_core.stages.gpu_memory import stage_memory

    memories = {stage: stage_memory(config, model, stage, gpu_bytes=has) for stage in trained_stages(config)}
    return [
        Finding(
            ok=memory.fits(has),
            what=f"{stage}: {memory} of each GPU's {has / GB:.0f} GB",
            remedy=f"{stage}.checkpointing=auto; {stage}.optim.accumulate up; sft.max_length, rl.answers_at_once down;"
            " launch.deepspeed_stage=3 divides the weights among the GPUs, too, for sft alone; or more "
            "GPUs, or a smaller profile",
        )
        for stage, memory in memories.items()
    ]


def agent_memory(config: Config, model: Network, has: int) -> Finding:
    """Compare what the agent's RL holds on each GPU, in episodes of the longest, with the smallest GPU's
    bytes. `model`: of its own, for it gets the agent's resolution."""
    from ans_core.stages.agent_memory import rft_memory

    memory = rft_memory(config, model)
    return Finding(
        ok=memory.fits(has),
        what=f"rft: {memory} of each GPU's {has / GB:.0f} GB",
        remedy="agent.episode.tokens or agent.episode.batch down, agent.rft.optim.accumulate up, or more GPUs",
    )


def trained_stages(config: Config) -> list[Literal["sft", "rl"]]:
    """Return the training stages that learn anything. Only `sft` runs under ZeRO-3: then `rl` is left out."""
    stages = list[Literal["sft", "rl"]]()
    if config.sft.optim.steps or config.sft.optim.epochs:
        stages.append("sft")
    if config.launch.deepspeed_stage < 3:
        stages.append("rl")
    return stages


def shared_memory(config: Config, model: Network, folder: Path = Path("/dev/shm")) -> Finding:
    """Check that the loaders' batches of SFT and RL have room in shared memory: many containers have 64 MB of
    it."""
    from ans_core.stages.gpu_memory import loader_bytes
    from ans_core.stages.launch import check_shared_memory

    here = max(1, config.launch.processes // int(os.environ.get("PET_NNODES", "1")))
    processes = config.launch.processes
    size = max(
        (loader_bytes(config, model, stage, processes=processes) for stage in trained_stages(config)),
        default=0,
    )
    try:
        check_shared_memory(config.launch.workers, size, processes=here, folder=folder)
    except RuntimeError as error:
        what, _, remedy = str(error).partition(": ")
        return fault(what, remedy)
    return fine(f"{folder} has room for the batches of {here} x {config.launch.workers} loader processes")


def disk(config: Config, counts: Parameters, free: int) -> Finding:
    """Base and converted model are written once and copied into DVC's cache; so are the deltas of SFT and RL;
    states replace each other."""
    wanted = 4 * counts.base + 4 * counts.delta + config.launch.keep_states * counts.training_state
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
            remedy = (
                f"`ans weights fetch` lists names and where they go; or `hf download {name}`, into the "
                "hub's cache"
            )
            findings.append(
                fault(f"base.{key}: {name} is neither on this disk nor in the hub's cache", remedy)
            )
    return findings or [fine("the base's weights are there")]


def data(config: Config, root: Path) -> Finding:
    sources = [*config.prepare.sources, *config.evaluate.sources, *config.agent.sources]
    agent = config.agent
    named = [("agent.sft.traces", agent.sft.traces), ("agent.sft.lora_ranks_from", agent.sft.lora_ranks_from)]
    named += [("agent.segmenter", agent.segmenter), *((source.name, source.path) for source in sources)]
    lacking = [f"{name} ({path})" for name, path in named if path and not (root / path).exists()]
    if not lacking:
        return fine(f"{len(sources)} data sets of params.yaml are there")
    more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
    return fault(
        f"data sets that are not there: {', '.join(lacking[:SHOWN])}{more}",
        "`ans data fetch` lists names that can be had; or correct the paths in params.yaml",
    )
