"""Samples in, what reports say of them out: counts, sizes, mask areas and text lengths, in one pass that
holds numbers alone."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ans_core.data.index import picture_digest
from ans_core.pictures import rle
from ans_core.types import Sample


@dataclass(kw_only=True)
class Facts:
    """What a split holds."""

    samples: int = 0
    tasks: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    """Samples of a kind (`meta["kind"]`), or of a task where a set has no kinds."""
    images: set[str] = field(default_factory=set)
    """`image_id`s."""
    sizes: set[tuple[int, int]] = field(default_factory=set)
    """(width, height) in pixels."""
    words: array[int] = field(default_factory=lambda: array("i"))
    """Words of every text."""
    areas: array[float] = field(default_factory=lambda: array("f"))
    """Share of the picture of every visible mask."""
    absent: int = 0
    """Masks of frames in which their object does not show."""
    unknown: int = 0
    """Frames in which an object is not annotated."""
    joined: int = 0
    """Masklets of clips that stand for all of a category, whose annotation has no identities."""
    frames: dict[bytes, int] = field(default_factory=dict)
    """Frames of every picture (1; also several in one question) and clip, by digest."""
    without: int = 0
    """Expressions that nothing fits."""


def facts(samples: Iterable[Sample]) -> Facts:
    totals = Facts()
    for sample in samples:
        totals.samples += 1
        totals.tasks[sample.task] += 1
        totals.kinds[str(sample.meta.get("kind", sample.task))] += 1
        totals.images.add(sample.image_id)
        totals.sizes.add((sample.width, sample.height))
        totals.words.append(len(sample.text.split()))
        totals.frames[picture_digest(sample)] = 1 if sample.stills else len(sample.frames)
        totals.joined += len(sample.meta.get("joined", ())) if len(sample.frames) > 1 else 0
        totals.without += sample.task == "referring" and not sample.masks
        for mask in (mask for masklet in sample.masks for mask in masklet):
            if mask is None:
                totals.unknown += 1
            elif pixels := rle.area(mask):
                totals.areas.append(pixels / (sample.width * sample.height))
            else:
                totals.absent += 1
    return totals


def shown_frames(sample: Sample) -> list[int]:
    """Return a clip's first, middle and last frame; 0 for a picture; all of several pictures."""
    if sample.stills:
        return list(range(len(sample.frames)))
    return sorted({0, len(sample.frames) // 2, len(sample.frames) - 1})
