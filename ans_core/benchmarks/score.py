"""The result type of every benchmark, and what several of them share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ans_core.pictures import rle
from ans_core.types import RLE, Prediction, Request, Sample


@dataclass(frozen=True, kw_only=True)
class Score:
    metrics: dict[str, float]
    """Names without benchmark and split. A metric without samples is left out."""
    per_sample: list[float]
    """Each sample's own main metric in [0, 1]: it decides which overlays show right and which wrong answers."""
    details: list[dict[str, bool]] = field(default_factory=list)
    """Further facts about each sample, one entry per sample; empty = none."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The question for a sample, its perfect answer, and the scoring. Pure functions: pixels stay in files."""

    request: Callable[[Sample], Request]
    truth: Callable[[Sample], Prediction]
    score: Callable[[Sequence[Sample], Sequence[Prediction]], Score]


def check_pairs(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> None:
    if not samples or len(samples) != len(predictions):
        raise ValueError(f"{len(samples)} samples and {len(predictions)} predictions: one prediction per sample, at least one sample")


def meant(sample: Sample, frame: int) -> RLE | None:
    """Return all the sample's objects in one frame as one mask, as one `[SEG]` draws several; None: not annotated."""
    present = [mask for masklet in sample.masks if (mask := masklet[frame]) is not None]
    if present:
        return rle.union(present)
    return None if sample.masks else rle.empty(sample.height, sample.width)


def mean(numbers: Iterable[float]) -> float:
    listed = list(numbers)
    return sum(listed) / len(listed)


def by_kind(samples: Sequence[Sample], values: Sequence[float], name: str) -> dict[str, float]:
    """Return `gIoU/relation` and so on, for every `meta["kind"]` in the samples."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for sample, value in zip(samples, values, strict=True):
        if "kind" in sample.meta:
            kinds[str(sample.meta["kind"])].append(value)
    return {f"{name}/{kind}": mean(listed) for kind, listed in sorted(kinds.items())}


def shuffled(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """Return the single-object samples, each with the expression of a sample in ANOTHER image and its own ground truth: a model that reads
    the text must now score badly. Images form a random ring; each takes its successor's texts (in turn, if it has more samples)."""
    of_image: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if len(sample.masks) == 1:
            of_image[sample.dataset, sample.image_id].append(sample)
    images = list(of_image)
    if len(images) < 2:
        raise ValueError(f"texts are shuffled between images; only {len(images)} image has single-object samples")
    order = np.random.default_rng(seed).permutation(len(images))
    swapped = []
    for here, there in zip(order, np.roll(order, -1), strict=True):
        texts = [sample.text for sample in of_image[images[there]]]
        swapped += [replace(s, text=texts[i % len(texts)]) for i, s in enumerate(of_image[images[here]])]
    return swapped
