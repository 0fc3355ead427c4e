"""Samples that training leaves out: others in their place, and a file that names and counts them."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from ans_core.data.collate import LeftOut
from ans_core.dist import shared_sum

Candidate = TypeVar("Candidate")
Read = TypeVar("Read")

STAND_INS = 10
"""Most others that are tried in the place of one that can't be read."""
MOST_STEPS = 10
"""In a row in which more than half of the rows can't be read."""


def first_readable(
    candidates: Iterable[Candidate],
    read: Callable[[Candidate], Read],
    *,
    name: Callable[[Candidate], str],
    stage: str,
) -> tuple[Candidate, Read, list[LeftOut]]:
    """Return the first candidate that can be read, what was read, and the candidates before it, for which
    `read` raised ValueError.

    For steps that need all their samples: they are functions of their number, so a run that raised at the
    first candidate would raise again whenever it is resumed. Raises ValueError if none can be read.
    """
    broken: list[LeftOut] = []
    for candidate in candidates:
        try:
            return candidate, read(candidate), broken
        except ValueError as error:
            broken.append(LeftOut(row=name(candidate), samples=1, reason=str(error), unreadable=True))
    raise ValueError(
        f"{stage}: {broken[0].row} can't be read, nor can {len(broken) - 1} others in its place: "
        f"{broken[0].reason}"
    )


class LeftOutFile:
    """One process's file, one JSON object per line: {step, row, samples, reason, unreadable}. Loader workers
    write it, the training loop counts it. A resumed run may write the same rows again; they count once."""

    def __init__(self, path: Path, *, rows: int) -> None:
        """rows: of a step, over all processes."""
        self.path, self.rows = path, rows
        self._bad_steps = 0
        self._read = 0
        self._lines: dict[int, set[bytes]] = defaultdict(set)

    def add(self, step: int, left_out: Sequence[LeftOut]) -> None:
        if not left_out:
            return
        for record in left_out:
            logging.warning(
                "training goes on without %d samples of %s: %s", record.samples, record.row, record.reason
            )
        lines = "".join(json.dumps({"step": step} | asdict(record)) + "\n" for record in left_out).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                lines = b"\n" + lines  # after what a machine that went down had of its last line
            if file.write(lines) < len(lines):  # at once: others write, too, and one reads
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def count(self, step: int) -> tuple[int, int]:
        """Return the samples of this step, and its unreadable rows; steps must be requested in order."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                complete, end, _ = file.read().rpartition(b"\n")
            self._read += len(complete + end)
            for line in complete.split(b"\n"):
                with suppress(ValueError):  # a cut line: the resumed run writes its step again
                    self._lines[json.loads(line)["step"]].add(line)
        lines = [json.loads(line) for line in self._lines.pop(step, ())]
        return sum(line["samples"] for line in lines), sum(line["unreadable"] for line in lines)

    def metrics(self, step: int, device: torch.device) -> dict[str, float]:
        """Return `skipped_samples` of the step over all processes, which must all call it; nothing if there
        are none. Raises RuntimeError where most rows are lost, as of a store that is away."""
        skipped, unreadable = shared_sum(torch.tensor(self.count(step)), device).tolist()
        self._bad_steps = self._bad_steps + 1 if 2 * unreadable > self.rows else 0
        if self._bad_steps > MOST_STEPS:
            raise RuntimeError(
                f"in {self._bad_steps} steps in a row, up to step {step}, more than half of the rows could not "
                f"be read; {self.path} has the reasons. Once the files are there again, the next start goes on"
            )
        return {"skipped_samples": float(skipped)} if skipped else {}
