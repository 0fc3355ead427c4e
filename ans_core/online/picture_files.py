"""Encoded pictures -> PNG files named by their content, written whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from ans_core.pictures import transforms
from ans_core.train.states import sync


def as_png(encoded: bytes) -> bytes:
    """Return the pixels as PNG: EXIF (places, names, thumbnails), colour profiles and comments are gone.
    Raises ValueError for what is no picture."""
    file = io.BytesIO()
    transforms.open_image(encoded).save(file, "PNG", compress_level=1, icc_profile=None)
    return file.getvalue()


def digest_of(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()


def path_of(folder: Path, digest: str) -> Path:
    return folder / digest[:2] / f"{digest}.png"


def read(path: Path) -> bytes:
    """Return a picture's bytes. Raises ValueError, naming the file, if it is missing or damaged."""
    try:
        encoded = path.read_bytes()
        transforms.open_image(encoded)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    return encoded


def put(folder: Path, encoded: bytes) -> str:
    """Write a picture unless it is there; return its digest once file and name are on disk. A `sweep` at the
    same time may take it away again: who counts on it looks for it while no sweep can run."""
    digest = digest_of(encoded)
    path = path_of(folder, digest)
    while not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{uuid4().hex}.partial")
        try:
            with partial.open("wb") as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):  # a sweep took it: once more
                partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(
                f"{path} can't be written ({error.strerror}); free space on its disk, or mend its rights"
            ) from None
    # the names; also where it is there: another process may not have come so far yet
    for parent in (path.parent, folder, folder.parent):
        sync(parent)
    return digest


def sweep(folder: Path, keep: Collection[str]) -> int:
    """Remove files that no experience has: a process was killed between writing them and its transaction.
    Return how many."""
    paths = {path_of(folder, digest) for digest in keep}
    lost = [path for path in folder.rglob("*") if path.is_file() and path not in paths]
    for path in lost:
        path.unlink(missing_ok=True)  # somebody may have renamed it by now
    return len(lost)
