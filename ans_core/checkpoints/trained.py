"""The base folder and the trained tensors of SFT and RL -> a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ans_core import dist
from ans_core.checkpoints import checkpoint, folder, memory
from ans_core.model import adapters
from ans_core.model.network import Network

TEACHER = "teacher"
"""Folder of the teacher in what `rl` writes."""
STEPS = "steps"
"""Folder in what `sft` and `rl` write, of the models after earlier steps (`optim.keep_every`): a folder each,
named by the number of steps."""


def sft_model(
    base: Path,
    sft: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kind: type[Network] = Network,
) -> Network:
    """Load the base, put SFT's tensors (and those of the stage `memory`, which it holds) in place and merge
    its LoRA: RL starts from it. `kind`: as in `checkpoint.load`. Raises ValueError if they do not belong
    together."""
    tensors, config = checkpoint.load_delta(sft, base_hash=checkpoint.weights_hash(base))
    of_memory, tensors = memory.taken(tensors)
    model = checkpoint.load(base, kind=kind, dtype=dtype, device=device)
    memory.put(model, of_memory)
    if config.get("seg_object_score"):
        model.use_seg_object_score()
    if config["lora"] is None:  # the stage passed its base through
        return model.requires_grad_(False).eval()
    tuner = adapters.prepare_sft(
        model, adapters.lora_config(**config["lora"]), seed=dist.seed_of(config["seed"], "sft lora")
    )
    adapters.load_trained(model, tensors)
    adapters.merge(tuner)
    return model.requires_grad_(False).eval()


def refuse_untaught(base: Path) -> None:
    """Raise ValueError for a model folder that has not learned to answer with `[SEG]` (`untaught`)."""
    if made := untaught(base):
        sources = made.get("source")
        what = (
            f"{' with '.join(sources)}, whose text_hidden_fcs are random"
            if sources
            else "a model pre-trained from random weights"
        )
        raise ValueError(
            f"{base} is {what}: it has not learned to draw what it answers with [SEG], so it can't be "
            "passed through; train it (sft.optim.steps), or start from a Sa2VA: base.internvl names its "
            "folder or hub id, and base.sam2 stays empty"
        )


def untaught(model: Path) -> dict[str, Any] | None:
    """Return what the manifest of a model folder says of its making if the stage `base` made it of a language
    model and a SAM2 or of random weights; None for any other model."""
    made: dict[str, Any] = (folder.read_manifest(model) or {}).get("metadata", {})
    sources = made.get("source", [])
    joined = isinstance(sources, list) and len(sources) == 2 and all(sources)
    return made if made.get("stage") in {"base", "untrained"} and (joined or not sources) else None


def is_passed_through(sft: Path) -> bool:
    """Tell whether the stage `sft` trained nothing, so that its model is the base (with what `memory`
    trained)."""
    return (sft / checkpoint.DELTA).exists() and checkpoint.delta_config(sft)["lora"] is None


def rl_model(
    base: Path, sft: Path, rl: Path, *, device: torch.device | str = "cpu", kind: type[Network] = Network
) -> Network:
    """Load the merged SFT model and merge RL's policy into it."""
    return _policies(base, sft, rl, device, kind=kind).merged("policy").requires_grad_(False).eval()


def stage_model(
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kind: type[Network] = Network,
) -> Network:
    """Load the model that a stage's output makes: of `sft`, `rl` (or a step or the teacher in it) or
    `memory`, with the outputs of the stages before it from the folder around it. Merged in the base's own
    precision, as the stage `convert` does, then cast to `dtype`. Raises ValueError for another stage's
    output, and where one before it is missing."""
    stage, base, sft = trained_on(output)
    if stage == "memory":
        model = checkpoint.load(base, kind=kind, device=device)
        memory.load_into(model, output, base=base)
    else:
        how: Any = {"device": device, "kind": kind}
        model = sft_model(base, output, **how) if stage == "sft" else rl_model(base, sft, output, **how)
    if dtype is not None:
        model.to(dtype)
    model.norms_in_fp32()
    return model.requires_grad_(False).eval()


def trained_on(output: Path) -> tuple[str, Path, Path]:
    """Return (stage, base, output of `sft`) of the output of a stage that makes a model. Raises ValueError as
    `stage_model` does."""
    stage: Any = checkpoint.delta_config(output).get("stage")
    run = run_of(output)
    base, sft = run / "base/base", run / "sft"
    needed = {"memory": (base,), "sft": (base,), "rl": (base, sft)}.get(stage)
    if needed is None:
        raise ValueError(
            f"{output} is of the stage {stage!r}, whose output is no model; those of memory, sft and rl are"
        )
    if missing := [str(folder) for folder in needed if not folder.is_dir()]:
        raise ValueError(
            f"{output} is what the stage {stage} changed, and {' and '.join(missing)}, on which it was "
            "trained, is not there"
        )
    return stage, base, sft


def run_of(output: Path) -> Path:
    """Return the folder of the run in which a stage's output lies, also the teacher or a step in it."""
    output = output.absolute()
    inside = 1 if output.name == TEACHER else 2 if output.parent.name == STEPS else 0
    return output.parents[inside]


def policy_model(
    base: Path, sft: Path, rl: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Network:
    """Load the model as RL trained it: policy adapter active, not merged."""
    return _policies(base, sft, rl, device, dtype).model.eval()


def _policies(
    base: Path,
    sft: Path,
    rl: Path,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    kind: type[Network] = Network,
) -> adapters.Policies:
    tensors, config = checkpoint.load_delta(rl, base_hash=checkpoint.weights_hash(sft))
    policies = adapters.Policies(
        sft_model(base, sft, dtype=dtype, device=device, kind=kind),
        adapters.rl_config(**config["lora"], modules=config["modules"]),
        seed=0,
    )
    policies.load("policy", tensors)
    return policies
