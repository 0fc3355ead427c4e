"""A caption and the masks of its phrases -> a grounded_caption sample, for the readers of GranD-f, OpenPSG,
RefCOCOg and Flickr30k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ans_core.data.formats import checks
from ans_core.data.formats.media import Media
from ans_core.pictures import rle
from ans_core.types import RLE, Sample

IMAGE_FOLDERS = (
    "images", "../images", "../images/grandf/train", "../images/grandf/val_test",
    "../images/coco2014/train2014", "../images/coco2017", "../images/coco2017/train2017",
    "../images/flickr30k/Flickr30K",
)  # fmt: skip
"""Relative to the folder of the annotations; upstream's data tree has all but the first two."""

Phrase = tuple[int, int, list[RLE]]
"""[start, end) characters of the caption, and the masks of the objects that they name."""


def caption_of(text: str, *, where: str) -> str:
    """Strip quotation marks and white space: the published positions count from the first character after
    them."""
    stripped = text.strip('"').strip()
    checks.text(stripped, where)
    return stripped


def span(positions: Sequence[int], caption: str, *, where: str) -> tuple[int, int]:
    start, end = positions
    if not 0 <= start < end <= len(caption):
        raise checks.DataError(
            f"{where}: {rle.short([start, end])} are not characters of the caption (length {len(caption)})"
        )
    return start, end


def sample(
    caption: str,
    phrases: Iterable[Phrase],
    *,
    image: Media,
    sample_id: str,
    detail: bool = True,
) -> Sample:
    """Make a sample with phrases in the order of the caption. Masks of the same words are one phrase; of two
    phrases, one inside the other, the inner is left out; of two that overlap otherwise, the first ends where
    the second begins (as upstream trims them)."""
    merged: dict[tuple[int, int], list[RLE]] = {}
    for start, end, masks in phrases:
        merged.setdefault((start, end), []).extend(masks)
    spans: list[tuple[int, int]] = []
    for start, end in sorted(merged, key=lambda words: (words[0], -words[1])):
        if not spans or end > spans[-1][1]:
            spans.append((start, end))
    ends = [min(spans[n][1], spans[n + 1][0]) for n in range(len(spans) - 1)] + [end for _, end in spans[-1:]]
    return image.sample(
        sample_id=sample_id,
        image_id=image.stem,
        task="grounded_caption",
        text=caption,
        masks=tuple((rle.union(merged[words]),) for words in spans),
        phrases=tuple(
            (start, start + len(caption[start:end].rstrip()))
            for (start, _), end in zip(spans, ends, strict=True)
        ),
        detail=detail,
    )
