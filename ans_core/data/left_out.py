"""Record the samples that training left out in a file, and count them from it."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ans_core.data.collate import LeftOut
from ans_core.dist import shared_sum


class LeftOutFile:
    """One process's file, one JSON object per line: {step, row, samples, reason}. Loader workers write it, the training loop counts it. A
    resumed run may write the same rows again; they count once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._lines: dict[int, set[str]] = defaultdict(set)

    def add(self, step: int, left_out: Sequence[LeftOut]) -> None:
        if not left_out:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for found in left_out:
                logging.warning("training goes on without %d samples of %s: %s", found.samples, found.row, found.reason)
                file.write(json.dumps({"step": step} | asdict(found)) + "\n")

    def count(self, step: int) -> int:
        """Count the samples of this step; steps must be asked for in order."""
        if self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                file.seek(self._read)
                while line := file.readline():
                    self._lines[json.loads(line)["step"]].add(line)
                self._read = file.tell()
        return sum(json.loads(line)["samples"] for line in self._lines.pop(step, ()))

    def metrics(self, step: int, device: torch.device) -> dict[str, float]:
        """Return `skipped_samples` of the step over all processes, which must all call it; nothing if there are none."""
        skipped = float(shared_sum(torch.tensor(float(self.count(step))), device))
        return {"skipped_samples": skipped} if skipped else {}
