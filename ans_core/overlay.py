"""A picture, masks and words -> the picture with the masks drawn on: alone, truth beside prediction, or as an animation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageDraw, ImageFont

from ans_core import rle
from ans_core.types import RLE

COLOURS = (
    (0, 215, 255), (255, 40, 200), (170, 255, 0), (255, 140, 0), (130, 90, 255), (0, 255, 150), (255, 80, 80), (255, 235, 60),
)  # fmt: skip
"""Of object 0, 1, ...; then again from the start: neon, unlike what the objects themselves are painted in. The fill is
translucent, the contour opaque with a white rim."""
OPACITY = 0.25
"""Low, so that one still sees what colour the object has."""
PANEL_WIDTH = 320
"""Pixels that small pictures are enlarged to (nearest neighbour) in `side_by_side`, so that its words can be read."""


def draw(image: Image.Image, masks: Sequence[RLE | None]) -> Image.Image:
    """Mask i in COLOURS[i]; None draws nothing. The masks have the picture's size; the picture is left as it was."""
    pixels = np.asarray(image.convert("RGB")).astype(np.float32)
    contours = np.zeros(pixels.shape[:2], bool)
    edges = []
    for i, coded in enumerate(masks):
        if coded is None:
            continue
        if list(coded["size"]) != list(pixels.shape[:2]):
            raise ValueError(f"mask {i} of size {coded['size']} on a picture of [height, width] {list(pixels.shape[:2])}")
        mask, colour = rle.decode(coded), np.array(COLOURS[i % len(COLOURS)], np.float32)
        pixels[mask] = (1 - OPACITY) * pixels[mask] + OPACITY * colour
        edges.append((mask & ~_eroded(mask), colour))
        contours |= _grown(mask) & ~mask
    pixels[contours] = 255
    for edge, colour in edges:
        pixels[edge] = colour
    return Image.fromarray(pixels.round().astype(np.uint8))


def side_by_side(
    image: Image.Image,
    *,
    truth: Sequence[RLE | None],
    prediction: Sequence[RLE | None],
    question: str,
    truth_text: str,
    prediction_text: str,
) -> Image.Image:
    """Ground truth left, prediction right, the question above, what each says below."""
    scale = max(1, round(PANEL_WIDTH / image.width))
    size = (image.width * scale, image.height * scale)
    panels = [draw(image, masks).resize(size, Image.Resampling.NEAREST) for masks in (truth, prediction)]
    letter = max(13, 13 * size[0] // PANEL_WIDTH)  # a page shows wide pictures smaller, words and all
    gap, line, font = 8, letter + 4, ImageFont.load_default(size=letter)
    per_line = max(12, 13 * size[0] // (7 * letter))
    head = textwrap.wrap(question, 2 * per_line) or [""]
    below = [textwrap.wrap(f"{name}: {said}", per_line) for name, said in (("truth", truth_text), ("prediction", prediction_text))]
    top, bottom = gap + line * len(head), gap + line * max(map(len, below))
    sheet = Image.new("RGB", (2 * size[0] + 3 * gap, top + gap + size[1] + bottom + gap), "white")
    pen = ImageDraw.Draw(sheet)
    pen.multiline_text((gap, gap // 2), "\n".join(head), fill=(20, 20, 20), font=font, spacing=4)
    for i, (panel, lines) in enumerate(zip(panels, below, strict=True)):
        left = gap + i * (size[0] + gap)
        sheet.paste(panel, (left, top + gap))
        pen.multiline_text((left, top + gap + size[1] + gap // 2), "\n".join(lines), fill=(60, 60, 60), font=font, spacing=4)
    return sheet


def save_animation(frames: Sequence[Image.Image], path: Path, *, fps: float) -> None:
    """An endless GIF. All frames share one palette, taken from all of them: colours don't flicker."""
    strip = Image.fromarray(np.concatenate([np.asarray(frame.convert("RGB")) for frame in frames]))
    palette = strip.quantize(256)
    indexed = [frame.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    indexed[0].save(path, format="GIF", save_all=True, append_images=indexed[1:], duration=round(1000 / fps), loop=0)


def _grown(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """With the four neighbours of every pixel."""
    padded = np.pad(mask, 1)
    return padded[1:-1, 1:-1] | padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]


def _eroded(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    return ~_grown(~mask)
