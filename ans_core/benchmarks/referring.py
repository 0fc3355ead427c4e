"""Referring segmentation (RefCOCO/+/g, gRefCOCO): an expression in, one mask of everything it means out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ans_core.benchmarks.loops import predicted_mask
from ans_core.benchmarks.public.scored import Scored, mean
from ans_core.benchmarks.score import benchmark, by_kind, check_pairs, meant, of_each
from ans_core.metrics.mask import ciou, giou
from ans_core.metrics.referring import answer, target_accuracies
from ans_core.prompts import NO_TARGET_ANSWER, REFERRING_ANSWERS, REFERRING_EVAL, SEG, referring_question
from ans_core.types import RLE, Prediction, Request, Sample

_NEGATION = re.compile(r"\b(no|not|none|nothing|nobody|cannot|neither|without|absent)\b|n't\b")


def request(sample: Sample) -> Request:
    return Request(frames=sample.frames[:1], text=referring_question(sample.text, REFERRING_EVAL))


def truth(sample: Sample) -> Prediction:
    if not sample.masks:
        return Prediction(text=NO_TARGET_ANSWER)
    return Prediction(text=REFERRING_ANSWERS[0], masks=((_target(sample),),))


def score(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> Scored:
    """Score answers. gIoU, cIoU: single-object samples alone. `_several`: two or more objects; `_all`: every
    sample, as gRefCOCO counts (nothing meant: IoU 1 for an empty answer, else 0).

    Only the first `[SEG]` mask counts (upstream). No `[SEG]` = an empty mask: IoU 0 if something was meant,
    and the true pixels stay in cIoU's union. Upstream leaves such samples out of cIoU's sums; that flattering
    number is `cIoU_upstream`. N_acc / T_acc (gRefCOCO): the share of the samples with no / some target that
    are answered with no / some pixel. Words don't count there: any text without `[SEG]` is right. N_denied:
    the share of the samples with no target whose text also says so (`denies`).
    """
    check_pairs(samples, predictions)
    answers = [answer(predicted_mask(s, p), _target(s)) for s, p in zip(samples, predictions, strict=True)]
    per_sample = [a.counts for a in answers]
    parts = {
        "": [i for i, s in enumerate(samples) if len(s.masks) == 1],
        "_several": [i for i, s in enumerate(samples) if len(s.masks) > 1],
        "_all": list(range(len(samples))),
    }
    metrics: dict[str, float] = {}
    for suffix, part in parts.items():
        if part:
            metrics["gIoU" + suffix] = giou(per_sample[i] for i in part)
            metrics["cIoU" + suffix] = ciou(per_sample[i] for i in part)
    answered = [per_sample[i] for i in parts[""] if predictions[i].masks]
    if answered:
        metrics["cIoU_upstream"] = ciou(answered)
    metrics |= target_accuracies(answers)
    denials = [denies(p.text) for p in predictions]
    if silent := [float(denial) for denial, s in zip(denials, samples, strict=True) if not s.masks]:
        metrics["N_denied"] = mean(silent)
    ious = [c.iou for c in per_sample]
    metrics |= by_kind(samples, ious, "gIoU")
    metrics |= {"samples": len(samples), "single_object_samples": len(parts[""])}
    return of_each("gIoU_all", ious, metrics, denies=denials)


def denies(text: str) -> bool:
    """Tell whether a text denies: no mask, and a negation: "There is no such object.", "I can't find it."
    Only the words decide, so "no." denies as well."""
    return SEG not in text and _NEGATION.search(text.lower().replace("’", "'")) is not None


def _target(sample: Sample) -> RLE:
    target = meant(sample, 0)
    if target is None:
        raise ValueError(
            f"sample {sample.sample_id} of {sample.dataset} has no annotated mask; leave it out of the "
            "benchmark"
        )
    return target


BENCHMARK = benchmark("referring", request=request, truth=truth, of_samples=score)
