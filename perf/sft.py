"""SFT's speed on photographs: waiting for data, and a plain loop that takes one sample at a time.

    ANS_REFERENCE=FOLDER python perf/sft.py [--steps 4] [--rounds 3] [--workers 1] [--sides own plain]

FOLDER/data/regions holds photographs with masks (format `regions`); PICTURES of them are used, brought to
1,000 pixels on the long side. The model has the `tiny` profile's sizes and random weights. The sides do
the same steps: the same samples, LoRA, losses and optimizer.

- own: rows of up to QUESTIONS about a picture, which is encoded once, in batches.
- plain: upstream's order of work. Every sample is a row of its own, with five masks, SAM2 and the vision
  tower run for each.

The sides take turns, `--rounds` times. A column's value is the median of all steps, with the least and the
most of the rounds' medians. "CPU s" is the time of the process that trains, all threads together, without its
loaders: other work on the machine hardly changes it.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image

from ans_core.config import Config
from ans_core.data import conversation, read_samples
from ans_core.data.collate import Batch, Row, collate_readable
from ans_core.data.mixture import Mixture, Source
from ans_core.model import adapters
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised, layout_of
from ans_core.pictures import rle, transforms
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from ans_core.train import loop
from ans_core.train.watch import Watch
from ans_core.types import RLE, Sample

LONG_SIDE = 1000
PICTURES = 16
BATCH = 8
"""Pictures a step."""
QUESTIONS = 5
"""About a picture, at most."""
POINTS = 1024
FIGURES = ("samples_per_s", "step_s", "waiting_for_data", "cpu_s")
SIDES = ("own", "plain")
FIRST = 2
"""Steps before those that count: they set things up."""


def photographs(reference: Path) -> list[Sample]:
    found = read_samples(format="regions", path=reference / "data/regions", name="regions", split="train")
    chosen = list(dict.fromkeys(s.frames for s in found))[:PICTURES]
    large = {frames: enlarged(transforms.open_image(frames[0])) for frames in chosen}
    return [_on(s, *large[s.frames]) for s in found if s.frames in large]


def enlarged(image: Image.Image) -> tuple[bytes, int, int]:
    """Return a JPEG, its height and width."""
    scale = LONG_SIDE / max(image.size)
    width, height = round(image.width * scale), round(image.height * scale)
    file = io.BytesIO()
    image.resize((width, height)).save(file, "JPEG", quality=90)
    return file.getvalue(), height, width


def _on(sample: Sample, picture: bytes, height: int, width: int) -> Sample:
    def resized(mask: RLE) -> RLE:
        return rle.encode(
            np.asarray(Image.fromarray(rle.decode(mask)).resize((width, height), Image.Resampling.NEAREST))
        )

    masks = tuple(
        tuple(None if mask is None else resized(mask) for mask in masklet) for masklet in sample.masks
    )
    return replace(sample, frames=(picture,), height=height, width=width, masks=masks)


def model_of(samples: list[Sample]) -> Network:
    base = Config(profile="perf").base
    rng = Random(0)
    turns = [conversation.turn(sample, rng) for sample in samples for _ in range(4)]
    # else rows are of single letters
    tokenizer = build_tokenizer([text for turn in turns for text in (turn.question, turn.answer)])
    config = tiny_config(
        vision=base.vision.model_dump(),
        language=base.language.model_dump(),
        grounding=GroundingConfig(**base.sam.model_dump()),
        tokenizer=tokenizer,
        template=base.template,
        video_frames=1,
    )
    return build_tiny(config, tokenizer, seed=0)


class Side:
    """One way to train, on the rows of `mixture`."""

    def __init__(self, samples: list[Sample], *, steps: int, workers: int, plain: bool) -> None:
        self.steps, self.workers, self.plain = FIRST + steps, workers, plain
        model = model_of(samples)
        adapters.prepare_sft(model, adapters.lora_config(rank=32, alpha=64, dropout=0.0), seed=0)
        self.module = Supervised(model, mask_weight=2.0, dice_weight=0.5, points=POINTS)
        self.layout = layout_of(model, mask_size=128, max_length=8192, objects=5 if plain else 0)
        source = Source(name="regions", kind="extra", samples=samples)
        self.mixture = Mixture(
            [source], {"extra": 1.0}, questions=QUESTIONS, frames=1, seed=0, turn=conversation.turn
        )

    def rows(self, step: int) -> list[Row]:
        return self.mixture.rows(step, 0, batch=BATCH, micros=1)

    def batch(self, rows: list[Row]) -> Batch:
        return collate_readable(rows, self.module.model.tokenizer, self.layout)[0]

    def run(self) -> list[dict[str, float]]:
        """Return every step's figures."""
        return (
            self._one_by_one()
            if self.plain
            else self._train(lambda step, micro: self.batch(self.rows(step)), accumulate=1)
        )

    def _one_by_one(self) -> list[dict[str, float]]:
        """Every sample is a micro-batch: a step has as many as they have questions."""
        singles = [
            [
                Row(name=r.name, frames=r.frames, turns=(t,), seed=r.seed)
                for r in self.rows(s)
                for t in r.turns
            ]
            for s in range(self.steps)
        ]
        least = min(map(len, singles))
        return self._train(lambda step, micro: self.batch([singles[step][micro]]), accumulate=least)

    def _train(self, make: Callable[[int, int], Batch], *, accumulate: int) -> list[dict[str, float]]:
        told: list[dict[str, float]] = []
        spent = [time.process_time()]

        def log(metrics: dict[str, float], step: int) -> None:
            spent.append(time.process_time())
            told.append(
                {name: metrics[f"sft/speed/{name}"] for name in FIGURES[:-1]}
                | {FIGURES[-1]: spent[-1] - spent[-2]}
            )

        counts = Watch(counts=lambda batch: {"samples": float(batch.branch.amax(1).clamp(min=0).sum())})
        schedule = loop.Schedule(
            steps=self.steps,
            lr=1e-4,
            weight_decay=0.05,
            warmup=0.0,
            clip_grad=1.0,
            accumulate=accumulate,
            save_every=10**6,
        )
        machine = loop.Machine(device=torch.device("cpu"), dtype="bf16", workers=self.workers)
        with tempfile.TemporaryDirectory() as folder:
            loop.train(
                self.module, make, name="sft", schedule=schedule, machine=machine, seed=0,
                scratch=Path(folder),
                log=log, watch=counts,
            )  # fmt: skip
        return told[FIRST:]


def cell(rounds: list[list[dict[str, float]]], name: str) -> str:
    middle = statistics.median(row[name] for rows in rounds for row in rows)
    medians = [statistics.median(row[name] for row in rows) for rows in rounds]
    return f"{middle:.3g} ({min(medians):.3g} to {max(medians):.3g})"


def main(steps: int, workers: int, rounds: int, sides: Sequence[str]) -> None:
    samples = photographs(Path(os.environ["ANS_REFERENCE"]))
    pictures = {s.frames for s in samples}
    print(
        f"{len(samples)} samples of {len(pictures)} photographs, {torch.get_num_threads()} threads, "
        f"{workers} loader processes\n"
    )
    print("| side | samples/s | s a step | share waiting for data | CPU s a step |\n|---|---|---|---|---|")
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in sides:
            found[name].append(Side(samples, steps=steps, workers=workers, plain=name == "plain").run())
    for name, told in found.items():
        print(f"| {name} | {' | '.join(cell(told, figure) for figure in FIGURES)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.workers, arguments.rounds, arguments.sides)
