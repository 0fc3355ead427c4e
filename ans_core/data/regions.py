"""Which samples are regions with a caption: the RL loops train on them, and the judge asks about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ans_core.pictures import rle
from ans_core.types import Sample


def is_region(sample: Sample) -> bool:
    """Tell whether a sample is one mask in the first frame with its caption; the data set doesn't matter."""
    return sample.task == "region_caption" and len(sample.masks) == 1 and sample.masks[0][0] is not None


def wordless_regions(samples: Iterable[Sample]) -> list[Sample]:
    """Return every mask of pictures whose objects have no words (`tracking`: SA-1B) as a region with an empty caption."""
    return [
        replace(sample, sample_id=f"{sample.sample_id}/{number}", task="region_caption", masks=(masklet,))
        for sample in samples
        if sample.task == "tracking" and len(sample.frames) == 1
        for number, masklet in enumerate(sample.masks)
        if masklet[0] is not None and rle.area(masklet[0])
    ]
