"""Tell whether files that no stage has made are those of before: data, weights, traces."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ans_core.split_names import splits_beside

BY_TIME = {
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif",
    ".mp4", ".mov", ".mkv", ".avi", ".webm", ".arrow", ".parquet", ".zip", ".tar",
    ".safetensors", ".pt", ".pth", ".bin",
}  # fmt: skip
"""Suffixes of files that are told by their size and time of last change: pictures, videos, tables or archives
of them, and weights."""


def fingerprint(path: Path, *, leave_out: Path | None = None) -> str:
    """Hash `files_of(path)` but for those in the folder `leave_out`: names, sizes and bytes; for BY_TIME the
    time of last change instead of the bytes.

    Empty if it is missing. A million pictures, or a table that holds them, are too much to read before every
    run.
    """
    if not path.exists():
        return ""  # the stage reports the error
    digest = hashlib.sha256()
    folder = path if path.is_dir() else path.parent
    files = ((Path(name), size, changed_ns) for name, size, changed_ns in files_of(path))
    for name, size, changed_ns in sorted(files):
        file = folder / name
        if leave_out is not None and file.is_relative_to(leave_out):
            continue
        by_time = file.suffix.lower() in BY_TIME
        line = f"{'.' if file == path else name} {size} {changed_ns if by_time else ''}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
        if not by_time:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def files_of(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name from the folder, size, time of last change in ns) of every file that a data set in `path`
    may be read from: those in this folder, linked folders included; or this file, and those of other splits
    beside it."""
    if path.is_dir():
        yield from _files_in(f"{path}/", "", frozenset())
        return
    for file in (path, *splits_beside(path)):
        stat = file.stat()
        yield file.name, stat.st_size, stat.st_mtime_ns


def _files_in(root: str, folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    """`above`: device and inode of the folders around this one. A link to one of them is not entered."""
    stat = Path(root + folder).stat()
    place = (stat.st_dev, stat.st_ino)
    if place in above or not os.access(root + folder, os.R_OK | os.X_OK):  # readers can't enter it either
        return
    with os.scandir(root + folder) as entries:
        for entry in entries:
            if entry.is_symlink() and not Path(entry.path).exists():
                continue  # its file is gone
            if entry.is_dir():
                yield from _files_in(root, f"{folder}{entry.name}/", above | {place})
            elif entry.is_file():
                stat = entry.stat()
                yield folder + entry.name, stat.st_size, stat.st_mtime_ns
