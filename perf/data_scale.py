"""A million samples: how long a training stage takes to open them, how much memory its loader workers hold,
how fast rows are made.

    python perf/data_scale.py --samples 1000000 --workers 6        # 2 cores: about 6 minutes

Writes a data set in our own format (8 expressions a picture, masks as RLE like COCO's instances, 400 bytes
each) to --folder, compares the first 20,000 samples with what was written, reads all into the index as
`prepare` does, and measures from there. First reading: memory over that of the imported program; with --list
as if the reader made a list of them.

Bars: start <= 60 s after the first time, <= 1.2 GB resident in all (proportional set size of the training
process and its workers), rows of a step <= 2 ms (median of the 8 rows that one process has of a batch of 64
on 8 GPUs, 5 questions each). `..._cpu_...` is the process's own time, which other work on the machine hardly
changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from torch.utils.data import DataLoader

from ans_core import data
from ans_core.data import DatasetEntry, write_entries
from ans_core.data.conversation import turn
from ans_core.data.index import open_index, stamp_of
from ans_core.data.mixture import Mixture
from ans_core.pictures import rle
from ans_core.types import Sample
from perf.peak import watched

PER_PICTURE = 8
SIDE = 640, 480
LINKS = 30_000
"""A picture is linked under this many names: some file systems allow no more."""
ROWS, QUESTIONS, STEPS = 8, 5, 300
HEAD = 20_000


def write_set(folder: Path, samples: int) -> None:
    """Write `samples` expressions; the masks are 500 different ellipses with ragged borders."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    for number in range(-(-samples // PER_PICTURE)):
        first = folder / f"images/{number // LINKS * LINKS:09d}.jpg"
        if number % LINKS == 0:
            Image.fromarray(rng.integers(0, 255, (SIDE[1], SIDE[0], 3), dtype=np.uint8)).save(
                first, quality=30
            )
        else:
            os.link(first, folder / f"images/{number:09d}.jpg")
    with (folder / "annotations.jsonl").open("w") as file:
        for image, text, mask in values(samples):
            file.write(json.dumps({"image": image, "text": text, "masks": [mask], "split": "train"}) + "\n")


def values(samples: int) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yield (image, text, mask) of every sample."""
    rng = np.random.default_rng(1)
    masks = [_ellipse(rng) for _ in range(500)]
    for number in range(samples):
        which = ("red", "tall", "second", "leftmost")[number % 4]
        text = f"the {which} thing number {number} beside the table"
        yield f"images/{number // PER_PICTURE:09d}.jpg", text, masks[number % len(masks)]


def samples_of(folder: Path, count: int) -> Iterator[Sample]:
    """Yield what the reader returns."""
    for number, (image, text, mask) in enumerate(values(count), start=1):
        yield Sample(
            sample_id=f"line {number}", dataset="set", image_id=image, frames=(folder / image,),
            height=SIDE[1], width=SIDE[0], task="referring", text=text, masks=((mask,),),
        )  # fmt: skip


def _ellipse(rng: np.random.Generator) -> dict[str, object]:
    y, x = np.mgrid[: SIDE[1], : SIDE[0]]
    (cx, cy), (rx, ry) = rng.uniform((100, 100), (500, 380)), rng.uniform(20, 120, 2)
    inside = ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 + rng.normal(0, 0.02, SIDE[1])[:, None] < 1
    return rle.encode(inside)


def mixture(prepared: Path) -> Mixture:
    return Mixture(
        data.sources(prepared, "train"), {"extra": 1.0}, questions=QUESTIONS, frames=5, seed=0, turn=turn
    )


class Steps:
    def __init__(self, over: Mixture) -> None:
        self.over = over

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> int:
        return sum(len(row.turns) for row in self.over.rows(step, 0, batch=ROWS, micros=1))


def pss(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


def measure(prepared: Path, workers: int) -> dict[str, float]:
    """Open the data as a training stage does; the index is there."""
    before, spent = time.perf_counter(), time.process_time()
    mixed = mixture(prepared)
    mixed.rows(0, 0, batch=ROWS, micros=1)
    start_s, start_cpu_s = time.perf_counter() - before, time.process_time() - spent
    times, cpu = [], []
    for step in range(1, STEPS):
        before, spent = time.perf_counter(), time.process_time()
        mixed.rows(step, 0, batch=ROWS, micros=1)
        times.append(1000 * (time.perf_counter() - before))
        cpu.append(1000 * (time.process_time() - spent))
    loader = DataLoader(Steps(mixed), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    most = 0
    own = psutil.Process()
    for step, _ in enumerate(loader):
        if step % 50 == 40:
            most = max(most, sum(map(pss, [own, *own.children(recursive=True)])))
    return {
        "start_s": round(start_s, 2),
        "start_cpu_s": round(start_cpu_s, 2),
        "rows_ms_median": round(statistics.median(times), 3),
        "rows_cpu_ms_median": round(statistics.median(cpu), 3),
        "rows_ms_p95": round(sorted(times)[int(0.95 * len(times))], 3),
        "resident_gb": round(most / 1e9, 3),
    }


def first_reading(folder: Path, index: Path, *, whole: bool) -> dict[str, float]:
    """Read the data set into an index, as `prepare` does; `whole`: by a list of all samples."""
    stamp = stamp_of(folder, format="annotations", name="set", split="train")
    read = partial(data.FORMATS["annotations"], folder, name="set", split="train")
    before = time.process_time()
    with watched() as peak:
        samples = len(open_index(index, stamp, (lambda: list(read())) if whole else read))
    spent = time.process_time() - before
    return {
        "samples": samples,
        "first_cpu_us_a_sample": round(1e6 * spent / samples),
        "first_mb": round(peak.grown / 1e6),
    }


def check_head(folder: Path, head: Path) -> None:
    """Read the first HEAD records with the reader, whose samples must be those of `samples_of`."""
    head.mkdir(exist_ok=True)
    if not (head / "images").exists():
        (head / "images").symlink_to(folder / "images")
    with (folder / "annotations.jsonl").open() as lines:
        (head / "annotations.jsonl").write_text("".join(itertools.islice(lines, HEAD)))
    read = data.read_samples(format="annotations", path=head, name="set", split="train")
    expected = list(itertools.islice(samples_of(head, HEAD), len(read)))
    assert [replace(sample, sample_id="") for sample in read] == [
        replace(sample, sample_id="") for sample in expected
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path(".ans/data_scale"))
    parser.add_argument(
        "--list", action="store_true", help="make a list of all samples before the index is written"
    )
    parser.add_argument("--measure", choices=("first", "later"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve() / str(arguments.samples)
    prepared = folder / "prepared"
    if arguments.measure == "first":
        print(json.dumps(first_reading(folder / "set", folder / "index/set-train", whole=arguments.list)))
        return
    if arguments.measure == "later":
        print(json.dumps(measure(prepared, arguments.workers)))
        return
    if not (folder / "set/annotations.jsonl").exists():
        write_set(folder / "set", arguments.samples)
    prepared.mkdir(exist_ok=True)
    write_entries(
        prepared,
        [
            DatasetEntry(
                name="set", format="annotations", path=str(folder / "set"), split="train", kind="extra"
            )
        ],
    )
    check_head(folder / "set", folder / "head")
    shutil.rmtree(folder / "index", ignore_errors=True)
    told: dict[str, float] = {}
    for part in ("first", "later"):  # each in a process of its own
        words = [sys.executable, "-m", "perf.data_scale", "--measure", part, *sys.argv[1:]]
        told |= json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
    size = sum(file.stat().st_size for file in (folder / "index").rglob("*") if file.is_file())
    print(json.dumps(told | {"index_gb": round(size / 1e9, 3)}, indent=1))


if __name__ == "__main__":
    main()
