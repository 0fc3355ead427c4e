"""Grounded conversation (GCG, GranD-f): a picture in, a caption with masks for its phrases out."""

from __future__ import annotations

from collections.abc import Sequence

from ans_core.benchmarks.public.scored import Scored, mean
from ans_core.benchmarks.score import benchmark, check_pairs, of_each
from ans_core.metrics.caption import cider
from ans_core.metrics.grounding import Grounded, ground, phrases, plain_caption
from ans_core.metrics.meteor import meteor
from ans_core.pictures import rle
from ans_core.prompts import GROUNDED_EVAL, interleave
from ans_core.types import RLE, Masklet, Prediction, Request, Sample


def request(sample: Sample) -> Request:
    return Request(frames=sample.frames[:1], text=GROUNDED_EVAL)


def truth(sample: Sample) -> Prediction:
    return Prediction(
        text=interleave(sample.text, sample.phrases), masks=tuple((_first(m, sample),) for m in sample.masks)
    )


def score(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> Scored:
    """Score answers. mIoU is GranD-f's (matched pairs alone, mean over images); mIoU_all_objects also counts
    missed objects and extra masks. recall_token_f1 is GranD-f's recall with shared words instead of BERT for
    the phrases: not the benchmark's number."""
    check_pairs(samples, predictions)
    matched = [_ground(sample, prediction) for sample, prediction in zip(samples, predictions, strict=True)]
    captions, real = [plain_caption(p.text) for p in predictions], [s.text for s in samples]
    objects = sum(g.true for g in matched)
    metrics = {
        "mIoU": mean(g.miou for g in matched),
        "mIoU_all_objects": mean(g.miou_all for g in matched),
        "METEOR": mean(meteor(text, [reference]) for text, reference in zip(captions, real, strict=True)),
        "CIDEr": cider(captions, [[reference] for reference in real]),
        "samples": len(samples),
    }
    if objects:
        metrics["recall_token_f1"] = sum(g.recalled for g in matched) / objects
    return of_each("mIoU_all_objects", [g.miou_all for g in matched], metrics)


def _ground(sample: Sample, prediction: Prediction) -> Grounded:
    return ground(
        drawn=[_first(masklet, sample) for masklet in prediction.masks],
        drawn_phrases=phrases(prediction.text),
        true=[_first(masklet, sample) for masklet in sample.masks],
        true_phrases=[sample.text[start:end] for start, end in sample.phrases],
    )


def _first(masklet: Masklet, sample: Sample) -> RLE:
    return rle.empty(sample.height, sample.width) if masklet[0] is None else masklet[0]


BENCHMARK = benchmark("grounded_caption", request=request, truth=truth, of_samples=score)
