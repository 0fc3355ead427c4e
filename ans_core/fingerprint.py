"""Tell whether files that no stage has made are those of before: data, weights, traces."""

from __future__ import annotations

import hashlib
from pathlib import Path

BY_TIME = {
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif",
    ".mp4", ".mov", ".mkv", ".avi", ".webm", ".arrow", ".parquet", ".zip", ".tar",
    ".safetensors", ".pt", ".pth", ".bin",
}  # fmt: skip
"""Suffixes of files that are told by their size and time of last change: pictures, videos, tables or archives
of them, and weights."""


def fingerprint(path: Path, *, leave_out: Path | None = None) -> str:
    """Hash a folder (or file): names, sizes and bytes of everything in it but the folder `leave_out`; for
    BY_TIME the time of last change instead of the bytes.

    Empty if it is missing. A million pictures, or a table that holds them, are too much to read before every
    run.
    """
    if not path.exists():
        return ""  # the stage reports the error
    digest = hashlib.sha256()
    for file in sorted(p for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file()):
        if leave_out is not None and file.is_relative_to(leave_out):
            continue
        stat, by_time = file.stat(), file.suffix.lower() in BY_TIME
        digest.update(
            f"{file.relative_to(path)} {stat.st_size} {stat.st_mtime_ns if by_time else ''}\n".encode()
        )
        if not by_time:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]
