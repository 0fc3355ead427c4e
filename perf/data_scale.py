"""A million samples: how long a training stage takes to open them, how much memory its loader workers hold,
how fast rows are made, and the same of what `rl` selects from them.

    python -m perf.data_scale --samples 1000000 --workers 6        # 2 cores: about 6 minutes
    python -m perf.data_scale --samples 1000000 --workers 2 --s3   # the same samples in shards, in an S3 server (moto)

Writes a data set in our own format (8 expressions a picture, masks as RLE like COCO's instances, 400 bytes
each) to --folder, compares the first 20,000 samples with what was written, reads all into the index as
`prepare` does, and measures from there. First reading: memory over that of the imported program; with --list
as if the reader made a list of them.

Bars, of a million: SFT and RL start in 30 s after the first time and hold 0.5 GB a process (proportional set
size of the training process and its workers); of ten million: 1 GB. Rows of a step: the median of the 8 rows that
one process has of a batch of 64 on 8 GPUs, 5 questions each.
`..._cpu_...` is the process's own time, which other work on the machine hardly
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
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from botocore.config import Config
from PIL import Image
from torch.utils.data import DataLoader

from ans_core import data
from ans_core.data import DatasetEntry, shard, write_entries
from ans_core.data.conversation import turn
from ans_core.data.index import SampleIndex, hash_files, stamp_of, write_index
from ans_core.data.mixture import Mixture
from ans_core.data.selection import Expressions, Joined
from ans_core.pictures import rle
from ans_core.pictures.transforms import open_image
from ans_core.stages.rl_batches import rows_of, samples_by_loop
from ans_core.types import Sample
from perf.peak import anonymous, watched
from tasks.ports import free_port

PER_PICTURE = 8
SIDE = 640, 480
LINKS = 30_000
"""A picture is linked under this many names: some file systems allow no more."""
ROWS, QUESTIONS, STEPS = 8, 5, 300
HEAD = 20_000
SHARD = 4 << 20


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
        "resident_with_pictures_gb": round(most / 1e9, 3),
    }


def measure_rl(prepared: Path) -> dict[str, float]:
    """Select samples and expressions as the stage `rl` does, up to the first step's."""
    held, before = anonymous(), time.perf_counter()
    with watched() as peak:
        joined = Joined([source.samples for source in data.sources(prepared, "train")])
        practice = samples_by_loop(joined, ("refer",))
        expressions = [Expressions(chosen, joined) for chosen in practice.samples]
        for chosen, asked in zip(practice.samples, expressions, strict=True):
            for row in rows_of(len(chosen), 0, batch=ROWS, seed=0):
                assert chosen[row].masks
                asked[row]
    return {
        "rl_start_s": round(time.perf_counter() - before, 2),
        "rl_held_mb": round((anonymous() - held) / 1e6),
        "rl_peak_mb": round(peak.grown / 1e6),
    }


def first_reading(folder: Path, index: Path, *, form: str, whole: bool) -> dict[str, float]:
    """Read the data set into an index, as `prepare` does; `whole`: by a list of all samples."""
    stamp = stamp_of(folder, format=form, name="set", split="train", files=hash_files(folder))
    read = partial(data.FORMATS[form], folder, name="set", split="train")
    before, start_s = time.process_time(), time.perf_counter()
    with watched() as peak:
        write_index(index, stamp, (lambda: list(read())) if whole else read)
        samples = len(SampleIndex(index))
    spent = time.process_time() - before
    return {
        "samples": samples,
        "first_s": round(time.perf_counter() - start_s),
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


def write_shards(folder: Path, samples: int) -> None:
    """Write a picture of its own for every PER_PICTURE expressions, in shards."""
    shard.SHARD_BYTES = SHARD  # moto reads a whole file for each request
    file = folder.with_name("picture.jpg")
    y, x = np.mgrid[: SIDE[1], : SIDE[0]]
    Image.fromarray(np.stack([x // 3, y // 2, (x + y) // 5], -1).astype(np.uint8)).save(file, quality=80)
    content = file.read_bytes()

    def of_own_picture() -> Iterator[Sample]:
        for sample in samples_of(folder, samples):
            yield replace(sample, frames=(content + sample.image_id.encode(),))  # JPEG ends before it

    folder.mkdir(parents=True)
    print(shard.write(of_own_picture(), folder))


@contextmanager
def s3(shards: Path, place: Path) -> Iterator[None]:
    """Serve the shards in an S3 server, which the environment names, and write a `.url` of them."""
    import boto3

    port = free_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "ANS_MEDIA_CACHE_GB": "0",
    }
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = boto3.client("s3", config=Config(retries={"max_attempts": 10}))
        client.create_bucket(Bucket="scale")
        for file in sorted(shards.iterdir()):
            client.put_object(Bucket="scale", Key=f"train/{file.name}", Body=file.read_bytes())
        place.mkdir(exist_ok=True)
        (place / "train.url").write_text("s3://scale/train")
        yield
    finally:
        server.terminate()
        server.wait()


class Pictures(Steps):
    """The rows of a step with their pictures, from the middle of an epoch on."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, step: int) -> int:
        rows = self.over.rows(self.middle + step, 0, batch=ROWS, micros=1)
        return sum(open_image(frame).width > 0 for row in rows for frame in row.frames)

    @property
    def middle(self) -> int:
        return self.over.epoch // ROWS // 2


def measure_store(prepared: Path, workers: int) -> dict[str, float]:
    """Resume in the middle of an epoch and read pictures from the store."""
    before = time.perf_counter()
    steps = Pictures(mixture(prepared))
    steps.over.rows(steps.middle, 0, batch=ROWS, micros=1)
    resumed_s = time.perf_counter() - before
    most, own, count = 0, psutil.Process(), 0
    before = time.perf_counter()
    for step, rows in enumerate(DataLoader(steps, batch_size=None, num_workers=workers)):  # type: ignore[arg-type]
        count += rows
        if step % 40 == 20:
            most = max(most, sum(map(pss, [own, *own.children(recursive=True)])))
    return {
        "resumed_s": round(resumed_s, 2),
        "rows_a_s": round(count / (time.perf_counter() - before), 1),
        "resident_gb": round(most / 1e9, 3),
    }


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
    parser.add_argument("--s3", action="store_true", help="in shards, in an S3 server on the loopback")
    parser.add_argument("--measure", choices=("first", "later", "rl", "store"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    form = "shards" if arguments.s3 else "annotations"
    folder = arguments.folder.resolve() / f"{arguments.samples}-{form}"
    prepared = folder / "prepared"
    if arguments.measure == "first":
        print(
            json.dumps(
                first_reading(folder / "set", folder / "index/set-train", form=form, whole=arguments.list)
            )
        )
        return
    if arguments.measure == "rl":
        print(json.dumps(measure_rl(prepared)))
        return
    if arguments.measure:
        measured = measure_store if arguments.measure == "store" else measure
        print(json.dumps(measured(prepared, arguments.workers)))
        return
    prepared.mkdir(parents=True, exist_ok=True)
    entry = DatasetEntry(name="set", format=form, path=str(folder / "set"), split="train", kind="extra")
    write_entries(prepared, [entry])
    if arguments.s3:
        if not (folder / "shards").exists():
            write_shards(folder / "shards", arguments.samples)
        with s3(folder / "shards", folder / "set"):
            report(folder, "first", "later", "rl", "store")
        return
    if not (folder / "set/annotations.jsonl").exists():
        write_set(folder / "set", arguments.samples)
    check_head(folder / "set", folder / "head")
    report(folder, "first", "later", "rl")


def report(folder: Path, *parts: str) -> None:
    """Measure each part in a process of its own, and print all."""
    shutil.rmtree(folder / "index", ignore_errors=True)
    measured: dict[str, float] = {}
    for part in parts:
        words = [sys.executable, "-m", "perf.data_scale", "--measure", part, *sys.argv[1:]]
        measured |= json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
    size = sum(file.stat().st_size for file in (folder / "index").rglob("*") if file.is_file())
    print(json.dumps(measured | {"index_gb": round(size / 1e9, 3)}, indent=1))


if __name__ == "__main__":
    main()
