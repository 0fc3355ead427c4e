"""Folders of tensors on disk: written whole or not at all, with a manifest of SHA-256 sums that reading checks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

MANIFEST = "manifest.json"
WEIGHTS_INDEX = "model.safetensors.index.json"


@contextmanager
def written_whole(path: Path, *, size: int) -> Iterator[Path]:
    """Gives `<path>.partial` to write into; on leaving it is synced and replaces `path`. After an error `path` is as before.

    Raises OSError before anything is written when the disk has less than `size` bytes (and 1 % for the small files) left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < size * 1.01:
        raise OSError(f"{path} needs {size / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB left; free some or write elsewhere")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    for file in partial.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)


def file_hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path, metadata: dict[str, Any]) -> None:
    """manifest.json: SHA-256 of every file beside it, and what the writer wants to be remembered."""
    files = {f.name: file_hash(f) for f in sorted(folder.iterdir()) if f.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"sha256": files, "metadata": metadata}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None where there is none of ours (folders from elsewhere may have another manifest.json)."""
    file = folder / MANIFEST
    if not file.exists():
        return None
    try:
        manifest = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is damaged: not JSON ({error})") from error
    return manifest if "sha256" in manifest else None


def verify(folder: Path) -> None:
    """Raises ValueError naming the first file that is missing or differs from the manifest; does nothing without one."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    for name, expected in manifest["sha256"].items():
        file = folder / name
        if not file.exists():
            raise ValueError(f"{file} is missing (its manifest lists it); restore the folder, e.g. with `dvc checkout`")
        if (actual := file_hash(file)) != expected:
            raise ValueError(
                f"{file} is damaged: {file.stat().st_size} bytes with SHA-256 {actual[:12]}, the manifest says {expected[:12]};"
                " restore the folder, e.g. with `dvc checkout`"
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those its index names, else all. Raises ValueError for a missing one."""
    index = folder / WEIGHTS_INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
    files = sorted(folder.glob("*.safetensors")) if names is None else [folder / name for name in names]
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file; a model has model.safetensors or shards with {WEIGHTS_INDEX}")
    if missing := [f.name for f in files if not f.exists()]:
        raise ValueError(f"{folder}: {missing[0]} is missing ({len(missing)} of {len(files)} shards that {WEIGHTS_INDEX} names)")
    return files


def tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files, one at a time, as a view of the file (copy it to keep it). Raises ValueError for a broken file."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (no mapping: it has no __iter__)
                    yield key, reader.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read as safetensors ({error}): cut short? copy or download it again") from error
