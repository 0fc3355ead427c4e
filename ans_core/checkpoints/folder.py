"""Folders of tensors on disk, with a manifest of SHA-256 sums that reading checks."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ans_core.checkpoints import hub_id

MANIFEST = "manifest.json"
AGAIN = "copy or download it again (a stage's output: `dvc checkout`)"
WEIGHTS_INDEX = "model.safetensors.index.json"
READ = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files of a model folder that loading needs; of a hub id no others are fetched."""


def local_folder(source: str | Path, patterns: tuple[str, ...] = READ) -> Path:
    """Return a local folder as it is; fetch the files of these patterns of a hub id into the hub's cache, and
    return their folder.

    Raises ValueError for what is neither. A name in a folder that is there is no hub id.
    """
    if str(source) and Path(source).is_dir():
        return Path(source)
    name = str(source)
    if Path(name).is_file():
        raise ValueError(f"{name} is a file; {hub_id.ADVICE}")
    hub_id.check(name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"no folder {name!r}, and it can't be had from the hub ({error}); {hub_id.ADVICE}"
        ) from error


def refuse_to_replace(path: Path, source: str | Path) -> None:
    """Raise ValueError if writing to `path` would delete anything but what an earlier conversion of `source`
    wrote: a file, a folder with an entry that our manifest does not list, or another model."""
    if path.is_file():
        raise ValueError(
            f"{path} is a file, and a folder is to be written there; give another name, or delete it"
        )
    if not path.exists():
        return
    manifest = read_manifest(path)
    listed = {MANIFEST, *manifest["sha256"]} if manifest else set()
    if others := sorted(entry.name for entry in path.iterdir() if entry.name not in listed):
        raise ValueError(
            f"{path} holds {others[0]}, which no earlier conversion wrote; give another folder, or delete "
            "this one"
        )
    written = (manifest or {}).get("metadata", {})
    if manifest and (written.get("stage") != "convert" or Path(written.get("source", "")) != Path(source)):
        raise ValueError(
            f"{path} holds a model that no earlier conversion of {source} wrote; give another folder, or delete "
            "this one"
        )


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn errors from reading and interpreting the JSON of `file` into a ValueError that names file and
    key."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not JSON ({error}); copy or download it again") from error
    except KeyError as error:
        raise ValueError(f"{file} has no {error}; copy or download it again") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{file} is malformed ({error}); copy or download it again") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def file_hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path, metadata: dict[str, Any]) -> None:
    """Write manifest.json: SHA-256 of every file beside it, and the writer's metadata."""
    files = {f.name: file_hash(f) for f in sorted(folder.iterdir()) if f.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"sha256": files, "metadata": metadata}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read manifest.json. None if there is none of ours (folders from elsewhere may have another
    manifest.json)."""
    file = folder / MANIFEST
    if not file.exists():
        return None
    with reading(file):
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if "sha256" not in manifest:
            return None
        if not all(isinstance(value, str) for value in dict(manifest["sha256"]).values()):
            raise ValueError("'sha256' holds something else than sums; copy or download it again")
        return dict(manifest)


def verify(folder: Path) -> None:
    """Raise ValueError naming the first file that is missing or differs from the manifest; does nothing
    without one. A file that the manifest does not list is not looked at. In the hub's cache only files of READ
    can be missing."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    of_cache = folder.parent.name == "snapshots"
    for name, expected in manifest["sha256"].items():
        file = folder / name
        if not file.exists():
            if of_cache and not any(fnmatch.fnmatch(name, pattern) for pattern in READ):
                continue
            raise ValueError(f"{file} is missing ({MANIFEST} lists it); {AGAIN}")
        if (actual := file_hash(file)) != expected:
            raise ValueError(
                f"{file} is damaged, or was edited: {file.stat().st_size} bytes with SHA-256 {actual[:12]}, "
                f"{MANIFEST} says {expected[:12]}; {AGAIN}, or, if the edit was intended, take the line of "
                f"{name} out of {MANIFEST}"
            )


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model folder: those in its index, or all without one. Raises ValueError
    for a missing one."""
    index = folder / WEIGHTS_INDEX
    if index.exists():
        with reading(index):
            files = [
                folder / name
                for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            ]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} holds no .safetensors file; a model has model.safetensors or shards with "
            f"{WEIGHTS_INDEX}"
        )
    if missing := [f.name for f in files if not f.exists()]:
        raise ValueError(
            f"{folder}: {missing[0]} is missing ({len(missing)} of {len(files)} shards that {WEIGHTS_INDEX} "
            "names)"
        )
    return files


def tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the files, one at a time, as a view of the file (copy it to keep it). Raises
    ValueError for a broken file, and for a tensor that two files hold."""
    return ((name, tensor) for name, tensor, _ in tensors_with_file(files))


def tensors_with_file(files: list[Path]) -> Iterator[tuple[str, Tensor, Path]]:
    """Yield what `tensors` does, and the file that holds it."""
    file_of: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (no mapping: it has no __iter__)
                    if key in file_of:
                        raise ValueError(
                            f"{file_of[key]} and {file} both hold {key}: move the file away that is not "
                            "this model's (one of an earlier download or conversion?)"
                        )
                    file_of[key] = file
                    yield key, reader.get_tensor(key), file
        except SafetensorError as error:
            raise ValueError(
                f"{file} cannot be read as safetensors ({error}): cut short? copy or download it again"
            ) from error
