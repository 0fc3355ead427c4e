"""What RL holds of N samples, and how long it takes until it knows them: an index is written, then read as
the stage `rl` does.

python perf/rl_memory.py 1000000
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ans_core.data.index import SampleIndex, Stamp, open_index
from ans_core.data.selection import Expressions, Joined
from ans_core.pictures import rle
from ans_core.stages.rl import rows_of, samples_by_loop
from ans_core.types import Sample


def samples(count: int) -> Iterator[Sample]:
    """Yield region captions and expressions in turns, two of each picture."""
    mask = rle.empty(64, 64) | {"counts": "0l8`7"}
    for number in range(count):
        task = "region_caption" if number % 2 else "referring"
        yield Sample(
            sample_id=str(number), dataset="drawn", image_id=str(number // 2),
            frames=(Path(f"/data/{number // 2}.jpg"),), height=64, width=64,
            task=task, text=f"the thing with the number {number}", masks=((mask,),),
        )  # fmt: skip


def memory_mb() -> float:
    """Memory of this process that no file backs, so that it is not an index's pages."""
    return psutil.Process().memory_full_info().uss / 1e6


def opened(folder: Path, count: int) -> SampleIndex:
    stamp = Stamp(format="drawn", path="", name="drawn", split="train", files=str(count), code="")
    return open_index(folder, stamp, lambda: samples(count))


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "index"
        begin_s = time.monotonic()
        writer = multiprocessing.get_context("spawn").Process(target=opened, args=(folder, count))
        writer.start()
        writer.join()
        print(f"index of {count:,} samples written by another process: {time.monotonic() - begin_s:.0f} s")
        before_mb, begin_s = memory_mb(), time.monotonic()
        joined = Joined([opened(folder, count)])
        practice = samples_by_loop(joined, ("caption", "mask", "refer"))
        expressions = [Expressions(chosen, joined) for chosen in practice.samples]
        print(f"selected: {time.monotonic() - begin_s:.1f} s, {memory_mb() - before_mb:.0f} MB")
        begin_s = time.monotonic()
        for chosen, asked in zip(practice.samples, expressions, strict=True):
            for row in rows_of(len(chosen), 0, batch=8, seed=0):
                assert chosen[row].task in {"region_caption", "referring"}
                asked[row]
        took_s, held_mb = time.monotonic() - begin_s, memory_mb() - before_mb
        print(f"first step's samples: {took_s:.1f} s, {held_mb:.0f} MB (torch and the rest: {before_mb:.0f})")


if __name__ == "__main__":
    main(int(sys.argv[1]))
