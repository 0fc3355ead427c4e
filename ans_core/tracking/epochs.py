"""Trained tensors of several epochs with their scores: the best and the last few stay on disk, also over a
restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from ans_core import dist
from ans_core.written import write_atomically


@dataclass(frozen=True, kw_only=True)
class EpochWeights:
    """A folder of files `epoch-N.safetensors` and their scores in `scores.json`; only the first process
    writes."""

    folder: Path
    last: int
    """Number of newest epochs that are kept beside the best one."""

    def scores(self) -> dict[int, float]:
        file = self.folder / "scores.json"
        stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {int(epoch): score for epoch, score in stored.items()}

    def best(self) -> int:
        """Return the epoch with the highest score, the earlier of two equal ones."""
        scores = self.scores()
        return max(scores, key=lambda epoch: (scores[epoch], -epoch))

    def present(self) -> list[int]:
        """List the epochs whose tensors are kept, in order."""
        scores = self.scores()
        newest = sorted(scores)[-self.last :] if self.last else []
        return sorted({*newest, *([self.best()] if scores else [])})

    def add(self, epoch: int, score: float, tensors: Mapping[str, Tensor]) -> None:
        """Keep an epoch's tensors; remove those that are neither the best nor among the last. An epoch that
        is trained again after a restart replaces itself, and all later ones go: they were of the run before,
        and need not come out alike (another number of processes, a GPU)."""
        if dist.rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(epoch, tensors)
            scores = {earlier: value for earlier, value in self.scores().items() if earlier < epoch}
            scores[epoch] = score
            write_atomically(self.folder / "scores.json", json.dumps(scores))
            stay = {self.file(number).name for number in self.present()}
            for file in self.folder.glob("epoch-*.safetensors"):
                if file.name not in stay:
                    file.unlink()
        dist.wait_for_all()

    def _write(self, epoch: int, tensors: Mapping[str, Tensor]) -> None:
        partial = self.folder / "partial.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)
        partial.replace(self.file(epoch))

    def file(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:04d}.safetensors"

    def load(self, epoch: int) -> dict[str, Tensor]:
        return load_file(self.file(epoch))
