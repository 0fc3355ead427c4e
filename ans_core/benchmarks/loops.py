"""Measure the two loops: mask -> caption -> mask' and caption -> mask -> caption', each closed by an inverse
model."""

from __future__ import annotations

from collections.abc import Sequence

from ans_core import prompts
from ans_core.metrics.mask import counts
from ans_core.metrics.meteor import meteor
from ans_core.pictures import rle
from ans_core.types import Predict, Prediction, Request, Sample


def caption_request(sample: Sample, mask: dict[str, object]) -> Request:
    """Ask what is in this mask."""
    return Request(frames=sample.frames[:1], text=prompts.REGION_EVAL, mask_prompts=(mask,))


def mask_request(sample: Sample, caption: str) -> Request:
    """Ask where the thing is that this caption describes."""
    return Request(
        frames=sample.frames[:1],
        text=prompts.referring_question(expression_of(caption), prompts.REFERRING_EVAL),
    )


def expression_of(caption: str) -> str:
    """Turn a caption into a referring expression: lower case, no full stop, definite article."""
    if "?" in caption:
        return caption  # the expression is a question; see `referring_question`
    text = caption.strip().lower().rstrip(".").strip()
    return "the " + text.removeprefix("a ").removeprefix("an ") if text.startswith(("a ", "an ")) else text


def predicted_mask(sample: Sample, prediction: Prediction) -> dict[str, object]:
    """Return the first mask of an answer, or an empty one."""
    first = prediction.masks[0][0] if prediction.masks else None
    return first if first is not None else rle.empty(sample.height, sample.width)


LoopMeans = list[tuple[str, str, float]]
"""(loop, metric, value)"""
LoopScores = list[tuple[str, str, list[float]]]
"""(loop, metric, value of each sample)"""


def averages(scores: LoopScores) -> LoopMeans:
    return [(loop, metric, sum(values) / len(values)) for loop, metric, values in scores]


def loop_scores(samples: Sequence[Sample], *, ask: Predict, inverse: Predict) -> LoopScores:
    """Score both loops on region-caption samples: `inverse` answers the greedy answers of `ask`."""
    captions = [p.text for p in ask([caption_request(s, true_mask(s)) for s in samples])]
    predicted = [
        predicted_mask(s, p)
        for s, p in zip(samples, ask([mask_request(s, s.text) for s in samples]), strict=True)
    ]
    return closed(samples, captions, predicted, inverse=inverse)


def loop_scores_of_truth(samples: Sequence[Sample], *, inverse: Predict) -> LoopScores:
    """Score both loops for a model that captions and draws perfectly: `inverse` answers the true captions and
    masks."""
    return closed(samples, [s.text for s in samples], [true_mask(s) for s in samples], inverse=inverse)


def closed(
    samples: Sequence[Sample],
    captions: Sequence[str],
    masks: Sequence[dict[str, object]],
    *,
    inverse: Predict,
) -> LoopScores:
    """Close both loops. loop1 IoU: true mask against the mask that `inverse` draws from the caption. loop2
    METEOR: true caption against the caption that `inverse` gives for the mask (an empty mask gets 0)."""
    nonempty = [i for i, mask in enumerate(masks) if rle.area(mask)]
    retold = inverse([caption_request(samples[i], masks[i]) for i in nonempty])
    scores = dict.fromkeys(range(len(samples)), 0.0)
    scores |= {
        i: meteor(p.text.rstrip("."), [samples[i].text]) for i, p in zip(nonempty, retold, strict=True)
    }
    return [
        ("loop1", "IoU", redrawn_ious(samples, captions, inverse=inverse)),
        ("loop2", "METEOR", list(scores.values())),
    ]


def redrawn_ious(samples: Sequence[Sample], captions: Sequence[str], *, inverse: Predict) -> list[float]:
    """Return the IoU of each true mask with the mask that `inverse` draws from the caption."""
    redrawn = inverse([mask_request(s, c) for s, c in zip(samples, captions, strict=True)])
    return [counts(predicted_mask(s, p), true_mask(s)).iou for s, p in zip(samples, redrawn, strict=True)]


def true_mask(sample: Sample) -> dict[str, object]:
    mask = sample.masks[0][0]
    assert mask is not None, f"{sample.sample_id}: a region sample has its mask in the first frame"
    return mask
