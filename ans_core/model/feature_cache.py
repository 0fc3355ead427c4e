"""Features of frozen encoders on disk, found again by the pixels they are of: what an epoch computed, the
next one reads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

LEFT = 0.9
"""Share of the limit that is left when old files make room."""
UNCOUNTED = 0.01
"""Share of the limit that a process writes before it counts the folder again, to which others write, too."""


class FeatureCache:
    """A folder of at most `limit` bytes, and UNCOUNTED more for each process and run that shares it. A file's
    name is the hash of its pixels and of `salt`: encoder, weights and precision. The files read longest ago
    make room for new ones."""

    def __init__(self, folder: Path, *, limit: int, salt: str) -> None:
        self.folder, self.limit, self.salt = folder, limit, salt.encode()
        self.hits = self.misses = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._bytes = sum(size for size, _, _ in self._files())
        self._uncounted = 0

    def features(
        self,
        items: Sequence[Tensor],
        compute: Callable[[list[int]], Sequence[tuple[Tensor, ...]]],
        *,
        names: Sequence[str],
    ) -> list[tuple[Tensor, ...]]:
        """Return every item's features. `compute` gets the indices of the items that are not known; `names`
        tell encoders and layouts of equal pixels apart."""
        paths = [self._path(item, name) for item, name in zip(items, names, strict=True)]
        cached = {
            i: parts
            for i, path in enumerate(paths)
            if (parts := self._read(path, items[i].device)) is not None
        }
        lacking = [i for i in range(len(items)) if i not in cached]
        self.hits, self.misses = self.hits + len(cached), self.misses + len(lacking)
        if lacking:
            for i, parts in zip(lacking, compute(lacking), strict=True):
                cached[i] = parts
                self._write(paths[i], parts)
        return [cached[i] for i in range(len(items))]

    def _path(self, item: Tensor, name: str) -> Path:
        raw_bytes = item.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        key = hashlib.blake2b(
            raw_bytes, key=hashlib.sha256(self.salt + name.encode()).digest(), digest_size=24
        ).hexdigest()
        return self.folder / key[:2] / f"{key}.safetensors"

    def _read(self, path: Path, device: torch.device) -> tuple[Tensor, ...] | None:
        """Return the parts; None if they are not known, or in a file that can't be read, which is written
        anew."""
        try:
            parts = load_file(path, device=str(device))
            os.utime(path)
        except (FileNotFoundError, SafetensorError):
            return None
        return tuple(parts[str(i)] for i in range(len(parts)))

    def _write(self, path: Path, parts: Sequence[Tensor]) -> None:
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file({str(i): part.detach().cpu().contiguous() for i, part in enumerate(parts)}, partial)
        size = partial.stat().st_size
        partial.replace(path)
        self._bytes, self._uncounted = self._bytes + size, self._uncounted + size
        if self._bytes > self.limit or self._uncounted > UNCOUNTED * self.limit:
            self._make_room()

    def _make_room(self) -> None:
        """Count the folder again; if it is over the limit, remove what was read longest ago."""
        files = sorted(self._files(), key=lambda file: file[1])
        self._bytes, self._uncounted = sum(size for size, _, _ in files), 0
        if self._bytes <= self.limit:
            return
        for size, _, path in files:
            if self._bytes <= LEFT * self.limit:
                return
            path.unlink(missing_ok=True)  # another process may have done it
            self._bytes -= size

    def _files(self) -> list[tuple[int, int, Path]]:
        """List (size, time of the last use, path), as far as other processes leave them."""
        entries = []
        for path in self.folder.glob("*/*.safetensors"):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            entries.append((facts.st_size, facts.st_mtime_ns, path))
        return entries
