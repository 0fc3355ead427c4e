"""Region captioning (RefCOCOg, describe-anything): a mask on the picture in, a caption of that region out."""

from __future__ import annotations

from collections.abc import Sequence

from ans_core.benchmarks.public.scored import Scored, mean
from ans_core.benchmarks.score import benchmark, check_pairs, of_each
from ans_core.data.conversation import regions_of
from ans_core.metrics.caption import attributes_right, cider, same_text
from ans_core.metrics.meteor import meteor
from ans_core.prompts import DETAILED_REGION_QUESTIONS, REGION_QUESTIONS, region_question
from ans_core.types import Prediction, Request, Sample

ATTRIBUTES = ("size", "colour", "texture", "shape")
"""Keys of `meta` with a word that a caption should use."""


def request(sample: Sample) -> Request:
    """Ask about all regions in one question; each masklet's first frame is a region."""
    regions = regions_of(sample)
    question = (DETAILED_REGION_QUESTIONS if sample.detail else REGION_QUESTIONS)[0]
    text = "<image>" + region_question(len(regions), question)  # no newline: see REGION_EVAL
    return Request(frames=sample.frames[:1], text=text, mask_prompts=regions)


def truth(sample: Sample) -> Prediction:
    return Prediction(text=sample.text)


def score(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> Scored:
    """Score answers. METEOR is NLTK's, mean over samples: the truth itself scores just below 1
    (metrics/meteor.py). exact_match: equal except for case, blanks and the final full stop.
    attribute_accuracy: colour AND shape right; `attribute_accuracy/size` and so on: each by itself."""
    check_pairs(samples, predictions)
    captions, real = [p.text for p in predictions], [s.text for s in samples]
    meteors = [meteor(text, [reference]) for text, reference in zip(captions, real, strict=True)]
    metrics = {
        "METEOR": mean(meteors),
        "CIDEr": cider(captions, [[reference] for reference in real]),
        "exact_match": mean(
            float(same_text(text, reference)) for text, reference in zip(captions, real, strict=True)
        ),
        "samples": len(samples),
    }
    right = attributes_right(
        captions,
        [{key: s.meta[key] for key in ATTRIBUTES if isinstance(s.meta.get(key), str)} for s in samples],
    )
    for key in ATTRIBUTES:
        if hits := [float(r[key]) for r in right if key in r]:
            metrics[f"attribute_accuracy/{key}"] = mean(hits)
    if both := [float(r["colour"] and r["shape"]) for r in right if "colour" in r and "shape" in r]:
        metrics["attribute_accuracy"] = mean(both)
    return of_each("METEOR", meteors, metrics)


BENCHMARK = benchmark("region_caption", request=request, truth=truth, of_samples=score)
