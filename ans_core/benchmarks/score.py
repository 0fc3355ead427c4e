"""A benchmark of samples: its questions, its scorer, and what several of them share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ans_core import data
from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, means_by_kind
from ans_core.metrics.bootstrap import Ratio
from ans_core.pictures import rle
from ans_core.types import RLE, Prediction, Request, Sample

SPLITS = ("test", "val")
"""Of a prepared folder, those that nothing is trained on."""


@dataclass(frozen=True, kw_only=True)
class Benchmark(Scorer):
    """The question for a sample, its perfect answer, and the scoring. Pure functions: pixels stay in
    files."""

    request: Callable[[Sample], Request]
    truth: Callable[[Sample], Prediction]
    of_samples: Callable[[Sequence[Sample], Sequence[Prediction]], Scored]
    """Its `samples` have a record each: `score`, the sample's own main metric in [0, 1], and further facts. A
    metric without samples is left out."""


def benchmark(
    name: str,
    *,
    request: Callable[[Sample], Request],
    truth: Callable[[Sample], Prediction],
    of_samples: Callable[[Sequence[Sample], Sequence[Prediction]], Scored],
) -> Benchmark:
    """Return the benchmark of the samples of this kind. As any other it is asked and scored from files:
    --data is a prepared folder."""

    def samples(folder: Path, split: str) -> dict[str, Sample]:
        of_split = [sample for source in data.sources(folder, split) for sample in source.samples]
        return {f"{n}:{s.sample_id}": s for n, s in enumerate(s for s in of_split if benchmark_of(s) == name)}

    def items(folder: Path, split: str) -> Iterator[Item]:
        for key, s in samples(folder, split).items():
            yield Item(
                name=key,
                request=request(s),
                truth=truth(s),
                expression=s.text if s.task == "referring" else None,
            )

    def record(item: Item, prediction: Prediction) -> dict[str, Any]:
        return {"id": item.name, **asdict(prediction)}

    def score(inputs: Inputs) -> Scored:
        by_name = samples(inputs.truth, inputs.split or SPLITS[0])
        lines = files.by_id(files.records(inputs.predictions), "id", where=inputs.predictions)
        names, missing = inputs.pair(lines, by_name, what="samples")
        answers = [
            checked(lines[key], by_name[key]) if key in lines else Prediction(text="") for key in names
        ]
        scored = of_samples([by_name[key] for key in names], answers)
        named = [{"id": key, **sample} for key, sample in zip(names, scored.samples, strict=True)]
        return replace(scored, samples=named, missing=missing)

    return Benchmark(
        score=score,
        data="the folder that `prepare` wrote",
        options=frozenset({"predicted_only", "split"}),
        runner=Runner(items=items, record=record, splits=SPLITS),
        request=request,
        truth=truth,
        of_samples=of_samples,
    )


def benchmark_of(sample: Sample) -> str:
    return "video" if len(sample.frames) > 1 and sample.task == "referring" else sample.task


def checked(record: files.Record, sample: Sample) -> Prediction:
    """Read the prediction of a file that anybody may have written."""
    masklets = record.listed("masks", list)
    if not all(masklets):
        raise ValueError(f"{record.where}: a masklet without a frame")
    size = (sample.height, sample.width)
    masks = tuple(tuple(files.mask(m, size, where=record.where) for m in masklet) for masklet in masklets)
    return Prediction(text=record.text("text"), masks=masks)


def prediction_of(record: dict[str, Any]) -> Prediction:
    """Read what `asdict` made of a prediction."""
    return Prediction(text=record["text"], masks=tuple(map(tuple, record["masks"])))


def of_each(
    metric: str, scores: Sequence[float], metrics: dict[str, float], **facts: Sequence[Any]
) -> Scored:
    """Return figures of which `metric` is the mean of the samples' scores. facts: further ones of each
    sample."""
    samples = [
        {"score": score} | {key: each[n] for key, each in facts.items()} for n, score in enumerate(scores)
    ]
    return Scored(metrics=metrics, ratios={metric: Ratio(numerators=list(scores))}, samples=samples)


def check_pairs(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> None:
    if not samples or len(samples) != len(predictions):
        raise ValueError(
            f"{len(samples)} samples and {len(predictions)} predictions: one prediction per sample, at "
            "least one sample"
        )


def meant(sample: Sample, frame: int) -> RLE | None:
    """Return all the sample's objects in one frame as one mask, as one `[SEG]` draws several; None: not
    annotated."""
    present = [mask for masklet in sample.masks if (mask := masklet[frame]) is not None]
    if present:
        return rle.union(present)
    return None if sample.masks else rle.empty(sample.height, sample.width)


def by_kind(samples: Sequence[Sample], values: Sequence[float], name: str) -> dict[str, float]:
    """Return `gIoU/relation` and so on, for every `meta["kind"]` in the samples."""
    kinds = [[str(sample.meta["kind"])] if "kind" in sample.meta else [] for sample in samples]
    return means_by_kind(zip(kinds, values, strict=True), name)


def shuffled(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """Return the single-object samples, each with the expression of a sample in ANOTHER image and its own
    ground truth: a model that reads the text must now score badly. Images form a random ring; each takes its
    successor's texts (in turn, if it has more samples)."""
    of_image: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if len(sample.masks) == 1:
            of_image[sample.dataset, sample.image_id].append(sample)
    images = list(of_image)
    if len(images) < 2:
        raise ValueError(
            f"texts are shuffled between images; only {len(images)} image has single-object samples"
        )
    order = np.random.default_rng(seed).permutation(len(images))
    swapped = []
    for here, there in zip(order, np.roll(order, -1), strict=True):
        texts = [sample.text for sample in of_image[images[there]]]
        swapped += [replace(s, text=texts[i % len(texts)]) for i, s in enumerate(of_image[images[here]])]
    return swapped
