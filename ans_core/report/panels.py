"""One sample and the answers of several models in, one picture out: the truth, then every answer, side by
side; of a clip an animation."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from PIL import Image

from ans_core.pictures import overlay, rle, transforms
from ans_core.report.files import webp_uri
from ans_core.types import RLE, ImageRef

Masklets = Sequence[Sequence[RLE | None]]
"""Masks by object and frame."""

WIDTH = 360
"""Pixels of a panel."""
GAP = 4
FRAMES = 16
"""Of a clip, at equal steps."""
FRAME_MS = 250
QUALITY = 82


def draw(
    frames: Sequence[ImageRef], truth: Masklets, answers: Sequence[Masklets], *, regions: Masklets = ()
) -> dict[str, Any]:
    """Return {source, width, height, frames}, the picture as a data URI."""
    content, size = webp(frames, truth, answers, regions=regions)
    return {"source": webp_uri(content), **size}


def webp(
    frames: Sequence[ImageRef], truth: Masklets, answers: Sequence[Masklets], *, regions: Masklets = ()
) -> tuple[bytes, dict[str, int]]:
    """Return the truth and then each answer as a WebP file, and its width, height and number of frames. Where
    one has no masks, the regions that were asked about are drawn."""
    columns = [truth or regions, *(answer or regions for answer in answers)]
    moves = any(len(masklet) > 1 for column in columns for masklet in column)
    steps = range(0, len(frames), math.ceil(len(frames) / FRAMES)) if moves else [0]
    sheets = [_sheet(frames[index], columns, index) for index in steps]
    content = io.BytesIO()
    more = {"save_all": True, "append_images": sheets[1:], "duration": FRAME_MS, "loop": 0} if moves else {}
    sheets[0].save(content, "WEBP", quality=QUALITY, **more)
    return content.getvalue(), {"width": sheets[0].width, "height": sheets[0].height, "frames": len(sheets)}


def _sheet(frame: ImageRef, columns: Sequence[Masklets], index: int) -> Image.Image:
    picture, *masks = shrunk(transforms.open_image(frame), *(at(column, index) for column in columns))
    width, height = picture.size
    sheet = Image.new("RGBA", (len(masks) * (width + GAP) - GAP, height), (0, 0, 0, 0))
    for place, listed in enumerate(masks):
        sheet.paste(overlay.draw(picture, listed), (place * (width + GAP), 0))
    return sheet


def at(masklets: Masklets, index: int) -> list[RLE | None]:
    """Return the masks of one frame; None beyond a masklet's end."""
    return [masklet[index] if index < len(masklet) else None for masklet in masklets]


def shrunk(picture: Image.Image, *masks: Sequence[RLE | None]) -> tuple[Any, ...]:
    """Return the picture and its masks at WIDTH pixels, if they are wider."""
    if picture.width <= WIDTH:
        return picture, *masks
    size = (WIDTH, max(1, round(picture.height * WIDTH / picture.width)))

    masks_of_size = ([mask and rle.resized(mask, size) for mask in listed] for listed in masks)
    return picture.resize(size), *masks_of_size
