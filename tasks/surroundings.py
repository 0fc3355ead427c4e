"""What a run is made with, as tags of MLflow: user, code, state of the pipeline, packages, hardware."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

from ans_core.processor import processor

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "sam2", "mlflow", "dvc", "prefect")
GPUS = Path("/proc/driver/nvidia/gpus")


def surroundings(root: Path) -> dict[str, str]:
    """Names that begin with `mlflow.` are those that its pages show as Source, User and Version."""
    code = git_tags(root)
    return {
        "mlflow.user": user(),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": code["git.sha"],
        **code,
        "dvc.lock": lock_hash(root),
        **{f"version.{name}": version for name, version in versions().items()},
        **hardware(),
    }


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return str(os.getuid())


def git(root: Path, *words: str) -> str:
    """Return what git prints; nothing if it fails."""
    return subprocess.run(
        ["git", *words], cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()


def git_tags(root: Path) -> dict[str, str]:
    return {
        "git.sha": git(root, "rev-parse", "HEAD"),
        "git.dirty": str(bool(git(root, "status", "--porcelain", "--untracked-files=no"))).lower(),
    }


def lock_hash(root: Path) -> str:
    """Return the hash of dvc.lock, which names every input and output; `none` without one."""
    lock = root / "dvc.lock"
    return hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else "none"


def versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def hardware() -> dict[str, str]:
    """Return the names of processor and GPUs, without loading a driver's library."""
    texts = [
        (folder / "information").read_text(encoding="utf-8", errors="replace")
        for folder in sorted(GPUS.glob("*"))
    ]
    gpus = [name[1].strip() for text in texts if (name := re.search(r"Model:\s*(.+)", text))]
    return {
        "hardware.cpu": f"{psutil.cpu_count()} x {processor()}",
        "hardware.memory_gb": f"{psutil.virtual_memory().total / 1e9:.0f}",
        "hardware.gpus": ", ".join(gpus) or "none",
    }
