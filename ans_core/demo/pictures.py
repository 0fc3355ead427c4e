"""What the page shows of a chat: a frame with masks and regions at a readable size, and a clip as MP4."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from ans_core.demo.chat import Answer
from ans_core.demo.sources import Source
from ans_core.inference.answer import save_video
from ans_core.pictures import overlay, rle
from ans_core.types import RLE

ENLARGED, LONGEST = 640, 1280
"""Pixels of the longer side to which small pictures are enlarged at most, and large ones reduced."""
LETTER = 16
THUMBNAIL = 224


def shown_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the size at which a picture is shown: enlarged by a whole number, its own, or reduced."""
    longer = max(size)
    scale = max(1, ENLARGED // longer) if longer <= LONGEST else LONGEST / longer
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def frame_picture(
    source: Source, frame: int, masks: Sequence[RLE | None], regions: Sequence[RLE] = ()
) -> Image.Image:
    """Draw a frame's masks in their colours, and regions as white outlines with their names."""
    picture = source.picture(frame)
    size = shown_size(picture.size)
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    picture = overlay.draw(picture, [mask and rle.resized(mask, size) for mask in masks])
    for number, region in enumerate(regions, start=1):
        _outline(picture, rle.decode(rle.resized(region, size)), f"region{number}")
    return picture


def data_uri(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=92, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def write_clip(source: Source, answer: Answer | None, path: Path) -> Path:
    """Write the clip with the masks that are switched on; without an answer, as it is. A clip that was
    stopped ends where it was stopped."""
    count = answer.followed if answer and answer.followed else len(source.frames)

    def frames() -> Iterator[Image.Image]:
        return (frame_picture(source, frame, answer.shown(frame) if answer else []) for frame in range(count))

    save_video(frames(), path, fps=source.fps)
    return path


def thumbnail(source: Source, regions: Sequence[RLE]) -> Image.Image:
    picture = frame_picture(source, 0, [], regions)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    return picture


def _outline(picture: Image.Image, mask: np.ndarray, name: str) -> None:
    """Draw a black line with a white core around a mask, and its name in the middle of its top."""
    if not mask.any():
        return
    inner, outer = (mask & ~ndimage.binary_erosion(mask, iterations=n) for n in (3, 5))
    picture.paste((0, 0, 0), mask=Image.fromarray(outer))
    picture.paste((255, 255, 255), mask=Image.fromarray(inner))
    rows, columns = np.nonzero(mask)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=LETTER)
    where = (float(columns.mean()), float(max(rows.min() - LETTER // 2, LETTER)))
    pen.text(where, name, fill="white", font=font, anchor="mm", stroke_width=3, stroke_fill="black")
