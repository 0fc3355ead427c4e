"""Draw masks on a picture: alone, or truth beside prediction."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image, ImageDraw, ImageFont

from ans_core.pictures import rle
from ans_core.types import RLE

COLOURS = (
    (0, 215, 255), (255, 40, 200), (170, 255, 0), (255, 140, 0), (130, 90, 255), (0, 255, 150), (255, 80, 80),
    (255, 235, 60),
)  # fmt: skip
"""Colours of objects 0, 1, ..., then again from the first: neon, unlike the colours of the objects
themselves. The fill is translucent, the contour opaque with a white rim."""
OPACITY = 0.25
"""Low, so that the object's own colour remains visible."""
PANEL_WIDTH = 320
"""Width in pixels to which `side_by_side` enlarges small pictures (nearest neighbour), so that its words can
be read."""


def draw(image: Image.Image, masks: Sequence[RLE | None]) -> Image.Image:
    """Draw mask i in COLOURS[i]; None draws nothing. Masks have the picture's size; the picture itself is not
    changed."""
    pixels = np.asarray(image.convert("RGB")).astype(np.float32)
    contours = np.zeros(pixels.shape[:2], bool)
    edges = []
    for i, coded in enumerate(masks):
        if coded is None:
            continue
        if list(coded["size"]) != list(pixels.shape[:2]):
            raise ValueError(
                f"mask {i} of size {coded['size']} on a picture of [height, width] {list(pixels.shape[:2])}"
            )
        mask, colour = rle.decode(coded), np.array(COLOURS[i % len(COLOURS)], np.float32)
        pixels[mask] = (1 - OPACITY) * pixels[mask] + OPACITY * colour
        edges.append((np.nonzero(mask & ~_eroded(mask)), colour))  # places: few, where a mask has every pixel
        contours |= _grown(mask) & ~mask
    pixels[contours] = 255
    for edge, colour in edges:
        pixels[edge] = colour
    return Image.fromarray(pixels.round().astype(np.uint8))


def index_picture(labels: UInt8[np.ndarray, "H W"]) -> Image.Image:
    """Return object numbers as a palette PNG holds them: 0 is black, object n has COLOURS[n - 1]."""
    picture = Image.fromarray(labels, "P")
    picture.putpalette([0, 0, 0, *(level for n in range(255) for level in COLOURS[n % len(COLOURS)])])
    return picture


def side_by_side(
    image: Image.Image,
    *,
    truth: Sequence[RLE | None],
    prediction: Sequence[RLE | None],
    question: str,
    truth_text: str,
    prediction_text: str,
) -> Image.Image:
    """Draw ground truth left, prediction right, the question above, and the text of each below."""
    scale = max(1, round(PANEL_WIDTH / image.width))
    size = (image.width * scale, image.height * scale)
    panels = [draw(image, masks).resize(size, Image.Resampling.NEAREST) for masks in (truth, prediction)]
    letter = max(13, 13 * size[0] // PANEL_WIDTH)  # a page scales wide pictures down with their words
    gap, line, font = 8, letter + 4, ImageFont.load_default(size=letter)
    per_line = max(12, 13 * size[0] // (7 * letter))
    head = textwrap.wrap(question, 2 * per_line) or [""]
    below = [
        textwrap.wrap(f"{name}: {text}" if text else name, per_line)
        for name, text in (("truth", truth_text), ("prediction", prediction_text))
    ]
    top, bottom = gap + line * len(head), gap + line * max(map(len, below))
    sheet = Image.new("RGB", (2 * size[0] + 3 * gap, top + gap + size[1] + bottom + gap), "white")
    pen = ImageDraw.Draw(sheet)
    pen.multiline_text((gap, gap // 2), "\n".join(head), fill=(20, 20, 20), font=font, spacing=4)
    for i, (panel, lines) in enumerate(zip(panels, below, strict=True)):
        left = gap + i * (size[0] + gap)
        sheet.paste(panel, (left, top + gap))
        pen.multiline_text(
            (left, top + gap + size[1] + gap // 2), "\n".join(lines), fill=(60, 60, 60), font=font, spacing=4
        )
    return sheet


def _grown(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """Grow a mask by the four neighbours of every pixel."""
    padded = np.pad(mask, 1)
    return padded[1:-1, 1:-1] | padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]


def _eroded(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    return ~_grown(~mask)
