"""dvc.lock, where DVC records what each stage read and wrote: its text in, plain values out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tasks.stages import GROUPS, dvc_file


def parse(text: str) -> Any:
    """Return the values of a dvc.lock. Raises yaml.YAMLError. libyaml takes a fifth of the time of
    `safe_load`."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def stages(text: str) -> list[dict[str, Any]]:
    """Return what is recorded of each stage; nothing for an empty text."""
    return [*((parse(text) or {}).get("stages", {})).values()]


def outputs(text: str) -> dict[str, str]:
    """Return DVC's hash of each output by its path."""
    return {out["path"]: out["md5"] for stage in stages(text) for out in stage.get("outs", [])}


def paths(root: Path) -> list[Path]:
    """Return the lock files that are there, the main group's first."""
    files = [root / dvc_file(group).with_suffix(".lock") for group in GROUPS]
    return [file for file in files if file.exists()]


def all_outputs(root: Path) -> dict[str, str]:
    """Return `outputs` of all groups."""
    recorded: dict[str, str] = {}
    for path in paths(root):
        recorded |= outputs(path.read_text(encoding="utf-8"))
    return recorded
