"""A folder with `manifest.jsonl` of masks on photographs -> one region_caption sample and one referring
sample per region.

The text is the caption or, without one, `<category> <place>`. Regions of one image with the same text share
one referring sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ans_core.data.formats import checks
from ans_core.data.formats.files import file_of
from ans_core.data.formats.media import Media, picture_of
from ans_core.data.formats.plain import split_by_image
from ans_core.data.scene_text import place_words
from ans_core.pictures import orientation, rle, transforms
from ans_core.types import RLE, Sample


class Region(checks.Record):
    id: checks.Id
    image: str
    segmentation: Any
    caption: str | None = None
    category: str | None = None
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)] | None = None
    """[x, y, width, height]"""
    width: checks.Integer | None = None
    height: checks.Integer | None = None


def read(path: Path, *, split: str) -> Iterator[Sample]:
    """Read one split; lines of other splits are only checked for their form."""
    file = path / "manifest.jsonl"
    checks.check_split(split, ("train", "val"), path=file)
    pictures: dict[str, Media] = {}
    text_of: dict[str, str] = {}
    """Spellings of one text -> the first."""
    by_text: dict[tuple[str, str], list[tuple[str, RLE]]] = {}
    lines, faults = _lines(file)
    for where, region in lines:
        if split_by_image(region.image) != split:
            continue
        with faults:
            if region.image not in pictures:
                image = file_of(path, region.image, where=where)
                picture = picture_of(image, where, stated=(region.height, region.width))
                if not region.caption and transforms.stored(image)[1] != orientation.UPRIGHT:
                    raise checks.DataError(
                        f"{where}: an EXIF tag turns the picture, so that its bbox tells no place; write a "
                        "caption, or turn the pixels"
                    )
                pictures[region.image] = picture
            picture = pictures[region.image]
            mask = picture.usable_mask(region.segmentation, where, faults=faults)
            text = _text(region, picture, where)
            by_text.setdefault((region.image, text_of.setdefault(checks.text_key(text), text)), []).append(
                (str(region.id), mask)
            )
            yield picture.sample(
                sample_id=f"{region.id}_caption",
                image_id=region.image,
                task="region_caption",
                text=text,
                masks=((mask,),),
                meta={"category": region.category} if region.category else {},
            )
    faults.tell()
    for (image_id, text), regions in by_text.items():
        masks = tuple((mask,) for _, mask in regions)
        yield pictures[image_id].sample(
            sample_id=f"{regions[0][0]}_referring",
            image_id=image_id,
            task="referring",
            text=text,
            masks=masks,
        )


def splits(path: Path) -> list[str]:
    lines, faults = _lines(path / "manifest.jsonl")
    faults.tell()
    return sorted({split_by_image(region.image) for _, region in lines})


def _lines(file: Path) -> tuple[list[tuple[str, Region]], checks.Faults]:
    """Return (place, region) of the well-formed lines, and the faults of the others."""
    faults = checks.Faults(file)
    lines: list[tuple[str, Region]] = []
    for number, value in checks.load_json_lines(file):
        with faults:
            region = checks.record(Region, value, f"{file}: line {number}")
            where = f"{file}: line {number} (id {str(region.id)[:60]})"
            faults.once(f"id {region.id}", where=where)
            lines.append((where, region))
    return lines, faults


def _text(region: Region, picture: Media, where: str) -> str:
    if region.caption:
        return checks.text(region.caption, where)
    category = checks.text(region.category, f"{where}: no caption, and as category")
    if region.bbox is None:
        raise checks.DataError(
            f"{where}: no caption and no bbox; one of them tells which {category} is meant"
        )
    x, y, w, h = region.bbox
    across, down = (x + w / 2) / picture.width, (y + h / 2) / picture.height
    if not (0 <= across <= 1 and 0 <= down <= 1 and w > 0 and h > 0):
        raise checks.DataError(
            f"{where}: bbox {rle.short(region.bbox)} is no box [x, y, width, height] in a picture of "
            f"{picture.width} x {picture.height}"
        )
    return f"{category} {place_words(across, down)}"
