"""The engine of predictions: items in batches, asked of a model -> predictions.jsonl, one line an item, in
the items' order.

Which items share a batch does not depend on the processes, and process r of n answers batches r, r + n, ...
So any number of processes, and a run that was killed and started again, give the same lines. Lines are
appended batch by batch to `parts/<rank>.jsonl`; when all are there, the first process puts them together.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ans_core import dist
from ans_core.benchmarks.public.asked import Answerer, Item, Running
from ans_core.benchmarks.public.files import Lines
from ans_core.progress import bar_interval_s
from ans_core.types import Prediction

Batches = Callable[[], Iterable[list[Item]]]
"""The same batches at every call. Pictures and masks are read when a batch's turn comes."""
PREDICTIONS, PARTS = "predictions.jsonl", "parts"
NAME = "item"
"""Key of a line with its item's name."""


def name_of(line: dict[str, str]) -> str:
    return line[NAME]


def by_picture(items: Callable[[], Iterable[Item]], size: int) -> Batches:
    """Return batches of up to `size` items. Those about one picture stay together as far as they fit; a clip
    shares a batch with no other, as all its frames are in memory."""

    def batches() -> Iterator[list[Item]]:
        batch: list[Item] = []
        for (_, is_clip), about in itertools.groupby(
            items(), key=lambda item: (item.request.frames, item.request.is_clip)
        ):
            while some := list(itertools.islice(about, size)):
                if batch and (is_clip or batch[0].request.is_clip or len(batch) + len(some) > size):
                    yield batch
                    batch = []
                batch += some
        if batch:
            yield batch

    return batches


def limited(
    items: Callable[[], Iterator[Item]], limit: int, group: Callable[[Item], Hashable]
) -> Callable[[], Iterator[Item]]:
    """Choose whole groups (`Runner.group`) at equal steps through all of them, as many as hold `limit` items
    of them on average; 0 = all."""
    sizes = Counter(map(group, items())) if limit else Counter[Hashable]()
    if sizes.total() <= limit:
        return items
    groups, count = list(sizes), math.ceil(limit * len(sizes) / sizes.total())
    chosen = {groups[i * len(groups) // count] for i in range(count)}
    return lambda: (item for item in items() if group(item) in chosen)


def predict_all(
    batches: Batches,
    answer: Answerer,
    record: Callable[[Item, Prediction], dict[str, Any]],
    *,
    out: Path,
    desc: str,
    running: Running | None = None,
) -> Path:
    """Write out/predictions.jsonl and return its path; what an earlier run has answered is not asked again.
    All processes must call it.

    record: an item's line. running: the metric whose mean the progress bar shows. Raises ValueError for items
    of one name, and without any.
    """
    joined = out / PREDICTIONS
    if not joined.exists():
        names, local_count = _plan(batches)
        parts = out / PARTS
        parts.mkdir(parents=True, exist_ok=True)
        for path in _parts(parts):
            if int(path.stem) % dist.world_size() == dist.rank():
                repair(path)
        dist.wait_for_all()
        answered = {name for path in _parts(parts) for name in _names(path)}
        with (
            (parts / f"{dist.rank()}.jsonl").open("a", encoding="utf-8") as file,
            _bar(desc, local_count) as bar,
        ):
            mean = _Mean(running)
            for batch in itertools.islice(batches(), dist.rank(), None, dist.world_size()):
                if new := [item.name for item in batch if item.name not in answered]:
                    # the batch as it was
                    answers = {item.name: (item, one) for item, one in zip(batch, answer(batch), strict=True)}
                    lines = [json.dumps({NAME: name, **record(*answers[name])}) + "\n" for name in new]
                    file.write("".join(lines))
                    file.flush()
                    os.fsync(file.fileno())
                    bar.set_postfix_str(mean.after([answers[name] for name in new]), refresh=False)
                bar.update(len(batch))
        dist.wait_for_all()
        if dist.rank() == 0:
            _join(names, parts, joined)
        dist.wait_for_all()
    return joined


def _plan(batches: Batches) -> tuple[list[str], int]:
    """Return the names of all items, in order, and how many of them this process answers."""
    names: dict[str, None] = {}
    local_count = 0
    for number, batch in enumerate(batches()):
        local_count += len(batch) if number % dist.world_size() == dist.rank() else 0
        for item in batch:
            if item.name in names:
                raise ValueError(f"two questions are named {item.name!r}; the benchmark's ids must be unique")
            names[item.name] = None
    if not names:
        raise ValueError("the benchmark has no question in this split")
    return list(names), local_count


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def repair(path: Path) -> None:
    """Cut a part off before its first line that can't be read. If that is more than a last line which a kill
    left half-written, warn, and keep the whole as <part>.damaged beside the folder of parts."""
    intact = 0
    with path.open("rb") as file:
        for line in file:
            if not (line.endswith(b"\n") and is_answer(line)):
                break
            intact += len(line)
        else:
            return
        complete_line = line.endswith(b"\n")
    if complete_line:
        aside = path.parent.with_name(path.name + ".damaged")
        shutil.copyfile(path, aside)
        logging.warning(
            "%s is damaged from byte %d on and was kept as %s; what stood there is asked again",
            path,
            intact,
            aside,
        )
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


def _join(names: list[str], parts: Path, joined: Path) -> None:
    lines: dict[str, Lines] = {}
    for path in _parts(parts):
        part = Lines(path, name_of)
        lines |= dict.fromkeys(part, part)
    partial = joined.with_suffix(".partial")
    with partial.open("wb") as file:
        for name in names:
            file.write(lines[name].line(name))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(joined)
    shutil.rmtree(parts)


def _bar(desc: str, total: int) -> tqdm:
    return tqdm(total=total, desc=desc, unit="", disable=dist.rank() > 0, mininterval=bar_interval_s())


class _Mean:
    """The mean of the running metric over what this process has answered."""

    def __init__(self, running: Running | None) -> None:
        self.running, self.total, self.count = running, 0.0, 0

    def after(self, answers: Iterable[tuple[Item, Prediction]]) -> str:
        if self.running is None:
            return ""
        metric, value = self.running
        for item, answer in answers:
            if item.truth is not None or item.objects is not None:
                self.total, self.count = self.total + value(item, answer), self.count + 1
        return f"{metric} {self.total / self.count:.3f}" if self.count else ""
