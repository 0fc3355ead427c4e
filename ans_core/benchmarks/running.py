"""Run a model on a benchmark: its items in batches -> predictions.jsonl, one line an item, in the items' order.

Which items share a batch is a function of the items alone, and process r of n answers batches r, r + n, ... So any number of processes, and
a run that was killed and started again, give the same lines. Lines are appended batch by batch to `parts/<rank>.jsonl`; when all are
there, the first process puts them together.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from ans_core import dist
from ans_core.benchmarks.public import Answerer, Item, Runner
from ans_core.benchmarks.public.files import Lines
from ans_core.progress import bar_interval_s
from ans_core.types import Prediction

PREDICTIONS, PARTS = "predictions.jsonl", "parts"
NAME = "item"
"""Key of a line with its item's name."""


def name_of(line: dict[str, str]) -> str:
    return line[NAME]


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Form batches of up to `size` items. Those about one picture stay together as far as they fit; a clip shares a batch with no other, as
    all its frames are in memory."""
    batch: list[Item] = []
    for (_, is_clip), about in itertools.groupby(items, key=lambda item: (item.request.frames, item.request.is_clip)):
        while some := list(itertools.islice(about, size)):
            if batch and (is_clip or batch[0].request.is_clip or len(batch) + len(some) > size):
                yield batch
                batch = []
            batch += some
    if batch:
        yield batch


def limited(items: Callable[[], Iterator[Item]], limit: int) -> Callable[[], Iterator[Item]]:
    """Choose `limit` items at equal steps through all of them; 0 = all."""
    total = sum(1 for _ in items()) if limit else 0
    if total <= limit:
        return items
    chosen = {i * total // limit for i in range(limit)}
    return lambda: (item for number, item in enumerate(items()) if number in chosen)


def predict_all(items: Callable[[], Iterator[Item]], ask: Answerer, runner: Runner, *, out: Path, batch: int, desc: str) -> Path:
    """Write out/predictions.jsonl and return its path; what an earlier run has answered is not asked again. All processes must call it.

    Raises ValueError for items of one name, and without any.
    """
    whole = out / PREDICTIONS
    if not whole.exists():
        names, own = _plan(items, batch)
        parts = out / PARTS
        parts.mkdir(parents=True, exist_ok=True)
        for path in _parts(parts):
            if int(path.stem) % dist.world_size() == dist.rank():
                repair(path)
        dist.wait_for_all()
        known = {name for path in _parts(parts) for name in _names(path)}
        with (parts / f"{dist.rank()}.jsonl").open("a", encoding="utf-8") as file, _bar(desc, own) as bar:
            answered = _Mean(runner)
            for some in own_batches(items, batch):
                if new := [item.name for item in some if item.name not in known]:
                    told = {item.name: (item, answer) for item, answer in zip(some, ask(some), strict=True)}  # the batch as it was
                    lines = [json.dumps({NAME: name, **runner.record(*told[name])}) + "\n" for name in new]
                    file.write("".join(lines))
                    file.flush()
                    os.fsync(file.fileno())
                    bar.set_postfix_str(answered.after([told[name] for name in new]), refresh=False)
                bar.update(len(some))
        dist.wait_for_all()
        if dist.rank() == 0:
            _join(names, parts, whole)
        dist.wait_for_all()
    return whole


def own_batches(items: Callable[[], Iterator[Item]], size: int) -> Iterator[list[Item]]:
    """Return this process's batches."""
    return (some for number, some in enumerate(batches(items(), size)) if number % dist.world_size() == dist.rank())


def _plan(items: Callable[[], Iterator[Item]], size: int) -> tuple[list[str], int]:
    """Return the names of all items, in order, and how many of them this process answers."""
    names: dict[str, None] = {}
    own = 0
    for number, some in enumerate(batches(items(), size)):
        own += len(some) if number % dist.world_size() == dist.rank() else 0
        for item in some:
            if item.name in names:
                raise ValueError(f"two questions are named {item.name!r}; the benchmark's ids must be unique")
            names[item.name] = None
    if not names:
        raise ValueError("the benchmark has no question in this split")
    return list(names), own


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def repair(path: Path) -> None:
    """Cut a part off before its first line that can't be read. If that is more than a last line which a kill left half-written, warn, and
    keep the whole as <part>.damaged beside the folder of parts."""
    intact = 0
    with path.open("rb") as file:
        for line in file:
            if not (line.endswith(b"\n") and is_answer(line)):
                break
            intact += len(line)
        else:
            return
        whole_line = line.endswith(b"\n")
    if whole_line:
        aside = path.parent.with_name(path.name + ".damaged")
        shutil.copyfile(path, aside)
        logging.warning("%s is damaged from byte %d on and was kept as %s; what stood there is asked again", path, intact, aside)
    os.truncate(path, intact)


def is_answer(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line)[NAME], str)
    except (ValueError, TypeError, KeyError):  # a UnicodeDecodeError is a ValueError
        return False


def _names(path: Path) -> Iterator[str]:
    """Yield the names of the lines. Another process may be writing the last one."""
    with path.open("rb") as file:
        yield from (json.loads(line)[NAME] for line in file if line.endswith(b"\n"))


def _join(names: list[str], parts: Path, whole: Path) -> None:
    lines: dict[str, Lines] = {}
    for path in _parts(parts):
        own = Lines(path, name_of)
        lines |= dict.fromkeys(own, own)
    partial = whole.with_suffix(".partial")
    with partial.open("wb") as file:
        for name in names:
            file.write(lines[name].line(name))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(whole)
    for path in _parts(parts):
        path.unlink()
    parts.rmdir()


def _bar(desc: str, total: int) -> tqdm:
    return tqdm(total=total, desc=desc, unit="", disable=dist.rank() > 0, mininterval=bar_interval_s())


class _Mean:
    """The mean of the running metric over what this process has answered."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.total, self.count = runner, 0.0, 0

    def after(self, told: Iterable[tuple[Item, Prediction]]) -> str:
        if self.runner.running is None:
            return ""
        metric, value = self.runner.running
        for item, answer in told:
            if item.truth is not None or item.objects is not None:
                self.total, self.count = self.total + value(item, answer), self.count + 1
        return f"{metric} {self.total / self.count:.3f}" if self.count else ""
