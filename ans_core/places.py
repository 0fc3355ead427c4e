"""The folder that commands work in: params.yaml, runs/, data/ and .ans/ are there."""

from __future__ import annotations

from pathlib import Path


def root() -> Path:
    """Return the checkout around the working directory, else the one that this package lies in, else the
    working directory."""
    here, source = Path.cwd(), Path(__file__).resolve().parents[1]
    return next((folder for folder in (here, *here.parents, source) if is_checkout(folder)), here)


def is_checkout(folder: Path) -> bool:
    """Tell whether a folder has the pipeline's files."""
    return (folder / "dvc.yaml").exists() and (folder / "profiles").is_dir()
