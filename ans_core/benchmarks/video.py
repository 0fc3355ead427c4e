"""Video referring segmentation (MeViS, Ref-YouTube-VOS): an expression in, one mask per frame of everything
it means out."""

from __future__ import annotations

from collections.abc import Sequence

from ans_core.benchmarks.public.scored import Scored, mean
from ans_core.benchmarks.score import benchmark, by_kind, check_pairs, meant, of_each
from ans_core.metrics.video import j_and_f
from ans_core.pictures import rle
from ans_core.prompts import NO_TARGET_ANSWER, REFERRING_ANSWERS, VIDEO_EVAL, referring_question
from ans_core.types import RLE, Prediction, Request, Sample


def request(sample: Sample) -> Request:
    return Request(frames=sample.frames, text=referring_question(sample.text, VIDEO_EVAL), clip=True)


def truth(sample: Sample) -> Prediction:
    """Return the true masks; frames without annotation are empty, because a prediction has a mask in every
    frame."""
    if not sample.masks:
        return Prediction(text=NO_TARGET_ANSWER)
    masklet = tuple(
        meant(sample, frame) or rle.empty(sample.height, sample.width) for frame in range(len(sample.frames))
    )
    return Prediction(text=REFERRING_ANSWERS[0], masks=(masklet,))


def score(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> Scored:
    """Score answers. J and F are averaged over all annotated frames of an expression, then over expressions
    (MeViS; no frame is dropped). J&F = (J + F) / 2. The first `[SEG]` counts; no `[SEG]` = empty masks."""
    check_pairs(samples, predictions)
    js, fs = [], []
    for sample, prediction in zip(samples, predictions, strict=True):
        j, f = _expression(sample, prediction)
        js.append(j)
        fs.append(f)
    both = [(j + f) / 2 for j, f in zip(js, fs, strict=True)]
    metrics = {"J": mean(js), "F": mean(fs), "J&F": (mean(js) + mean(fs)) / 2, "samples": len(samples)}
    return of_each("J&F", both, metrics | by_kind(samples, both, "J&F"))


def _expression(sample: Sample, prediction: Prediction) -> tuple[float, float]:
    predicted: Sequence[RLE | None] = prediction.masks[0] if prediction.masks else [None] * len(sample.frames)
    if len(predicted) != len(sample.frames):
        raise ValueError(
            f"sample {sample.sample_id} of {sample.dataset}: {len(predicted)} masks predicted for "
            f"{len(sample.frames)} frames"
        )
    nothing = rle.empty(sample.height, sample.width)
    frames = [
        j_and_f(mask or nothing, real)
        for t, mask in enumerate(predicted)
        if (real := meant(sample, t)) is not None
    ]
    if not frames:
        raise ValueError(
            f"sample {sample.sample_id} of {sample.dataset} has no annotated frame; leave it out of the "
            "benchmark"
        )
    return mean(j for j, _ in frames), mean(f for _, f in frames)


BENCHMARK = benchmark("video", request=request, truth=truth, of_samples=score)
