"""Hashes of a model's parts before and after a stage -> a check that the trained parts changed and no
other."""

from __future__ import annotations

import hashlib
import logging

import torch

from ans_core.model.backbones import BACKBONES
from ans_core.model.network import Network
from ans_core.train import sharding

PARTS = {
    **{
        f"{kind}.{prefix}": part
        for kind, backbone in BACKBONES.items()
        for part, prefix in backbone.parts.items()
    },
    "text_hidden_fcs.": "text_hidden_fcs",
    "sam2.image_encoder.": "SAM2 image encoder",
    "sam2.sam_mask_decoder.": "SAM2 mask decoder",
    "sam2.original_mask_decoder.": "SAM2 original mask decoder",
    "sam2.sam_prompt_encoder.": "SAM2 prompt encoder",
    "sam2.": "SAM2 memory",
}
"""Prefix of parameters -> part; the first prefix that matches counts."""


def part_of(name: str) -> str:
    """Return the part that a parameter belongs to. name: in the network, or in a module that has it as
    `model`; with PEFT around layers or without."""
    inside = name.removeprefix("model.").replace("base_model.model.", "")
    return next(part for prefix, part in PARTS.items() if inside.startswith(prefix))


def hashes(model: Network) -> dict[str, str]:
    """`part (trained)`, `(frozen)` or, in RL, `(teacher)` -> SHA-256 over its tensors' bytes, by what takes a
    gradient now. All processes must call it."""
    digests: dict[str, hashlib._Hash] = {}
    for name, p in model.named_parameters():
        role = "teacher" if ".teacher." in f"{name}." else "trained" if p.requires_grad else "frozen"
        key = f"{part_of(name)} ({role})"
        values = sharding.read(p).cpu().contiguous().flatten()
        digests.setdefault(key, hashlib.sha256()).update(values.view(torch.uint8).numpy().tobytes())
    return {key: digest.hexdigest() for key, digest in digests.items()}


def check_moved(before: dict[str, str], model: Network) -> dict[str, bool]:
    """Return which parts changed, and warn of trained ones that did not: no row may have given them a gradient.
    Raises RuntimeError if a frozen part changed, or nothing that was trained."""
    after = hashes(model)
    moved = {key: before[key] != after[key] for key in before}
    still = [key for key, did in moved.items() if not did and not key.endswith("(frozen)")]
    wrong = [key for key, did in moved.items() if did and key.endswith("(frozen)")]
    if not any(moved.values()):
        wrong += still
    if wrong or before.keys() != after.keys():
        raise RuntimeError(
            f"after training these parts are not as they should be: {wrong}; frozen parts must stay, "
            "trained parts must move"
        )
    if still:
        logging.warning("%s did not move: no row gave them a gradient", ", ".join(still))
    return moved
