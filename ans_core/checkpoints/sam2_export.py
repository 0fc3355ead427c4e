"""A model folder or a stage's output in, its SAM2 out: for the stock `sam2` package (sam2/) and for
transformers (transformers/).

ans convert runs/tiny/model DST --to sam2
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ans_core.checkpoints import checkpoint, memory
from ans_core.checkpoints import folder as folders
from ans_core.checkpoints import sam2 as sam2_files
from ans_core.checkpoints.trained import run_of
from ans_core.model.grounding import Grounding

STOCK, TRANSFORMERS = "sam2", "transformers"
"""Folders that `write` makes."""


def read(source: Path, *, base: Path | None = None) -> Grounding:
    """Load the SAM2 of a model (all that `sam2.load` reads), or of the output of the stages memory, sft and
    rl.

    Such an output holds trained tensors alone. `base`: the model that the stage `memory` started from; None
    is that of its run. Raises ValueError without one, for another one, and for the output of another stage.
    """
    file = source / checkpoint.DELTA
    if not file.is_file():
        return sam2_files.load(source)
    with folders.reading(file):
        stage = json.loads(file.read_text(encoding="utf-8"))["config"].get("stage")
    if stage == "rl":  # it draws masks from `[SEG]` alone: its SAM2 is SFT's
        sft = run_of(source.resolve()) / "sft"
        if not sft.is_dir():
            raise ValueError(
                f"{source} was trained on the output of SFT, and there is no {sft}; give SFT's output, or "
                "the model (model/)"
            )
        checkpoint.load_delta(source, base_hash=checkpoint.weights_hash(sft))
        return read(sft, base=base)
    if stage not in ("memory", "sft"):
        raise ValueError(
            f"{source} is the output of the stage {stage!r}, which holds no SAM2; give that of memory, sft "
            "or rl, or a model"
        )
    base = base or _base_of(source)
    tensors, config = checkpoint.load_delta(source, base_hash=sam2_files.identity(base)[1])
    if stage == "sft":
        tensors, _ = memory.taken(tensors)
    alone = (base / sam2_files.WEIGHTS).is_file()  # its size is the stage's; a whole model keeps its own
    sam2 = sam2_files.load(base, image_size=config.get("image_size", 0) if alone else 0)
    keys = sam2.load_state_dict(
        {name.removeprefix(sam2_files.PART): tensor for name, tensor in tensors.items()}, strict=False
    )
    assert not keys.unexpected_keys, (
        f"{source} was trained on {base}, and has other tensors: {keys.unexpected_keys[:3]}"
    )
    return sam2


def _base_of(source: Path) -> Path:
    """Find the base in the run's folder: beside the stage's output, or above memory/last/epoch-0003 or
    sft/steps/100."""
    for folder in source.resolve().parents[:3]:
        for base in (folder / "base/base", folder / "base/sam2"):
            if base.is_dir():
                return base
    raise ValueError(
        f"{source} holds trained tensors alone, and no base/base or base/sam2 lies beside it; name the base "
        "with --base"
    )


def write(sam2: Grounding, target: Path, *, metadata: dict[str, Any]) -> bool:
    """Write `target`/sam2 and, if transformers can have memories of this width, `target`/transformers; return
    whether it can. What an earlier call wrote there is replaced."""
    sam2_files.save(sam2, target / STOCK, metadata=metadata)
    if sam2.config.memory_width == sam2_files.TRANSFORMERS_WIDTH:
        sam2_files.save_transformers(sam2, target / TRANSFORMERS)
        return True
    shutil.rmtree(target / TRANSFORMERS, ignore_errors=True)
    return False


def refuse_to_replace(target: Path, source: str | Path) -> None:
    """Raise ValueError if `write` would delete anything but what it wrote of `source`."""
    for path in (target, *target.parents):
        if path.is_file():
            raise ValueError(
                f"{path} is a file, and a folder is to be written there; give another name, or delete it"
            )
    for name in (STOCK, TRANSFORMERS):
        folders.refuse_to_replace(target / name, source)
