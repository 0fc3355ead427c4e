"""A SAM2 as the benchmarks of video object segmentation see it: clips with their objects' first masks in,
masklets out."""

from __future__ import annotations

from collections.abc import Sequence

from ans_core.benchmarks.public.asked import Answerer, Item
from ans_core.model.grounding import Grounding
from ans_core.pictures import rle
from ans_core.tracking.follow import ObjectPrompt, check_prompts, frame_logits, label_map
from ans_core.types import RLE, Masklet, Prediction


def answerer(sam2: Grounding) -> Answerer:
    def answer(items: Sequence[Item]) -> list[Prediction]:
        return [Prediction(text="", masks=masklets(sam2, item)) for item in items]

    return answer


def masklets(sam2: Grounding, item: Item) -> tuple[Masklet, ...]:
    """Return every object's predicted masks. A pixel is of the surest object alone, unless the benchmark lets
    objects overlap."""
    assert item.objects is not None, f"{item.name}: a clip of video object segmentation has objects"
    objects, frames = item.objects(), item.request.frames
    prompts = [_first(masklet) for masklet in objects.masklets]
    check_prompts(prompts, frames, where=[f"{item.name}, object {name}" for name in objects.names])
    predicted: list[list[RLE]] = [[] for _ in prompts]
    for logits in frame_logits(sam2, frames, prompts):
        labels = None if objects.overlap else label_map(logits)
        masks = (
            (z > 0 for z in logits) if labels is None else (labels == n for n in range(1, len(prompts) + 1))
        )
        for masks_so_far, mask in zip(predicted, masks, strict=True):
            masks_so_far.append(rle.encode(mask))
    return tuple(map(tuple, predicted))


def _first(masklet: Masklet) -> ObjectPrompt:
    frame, mask = next((t, mask) for t, mask in enumerate(masklet) if mask is not None and rle.area(mask))
    return ObjectPrompt(frame=frame, mask=rle.decode(mask))
