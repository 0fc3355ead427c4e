"""Draw masks on a picture: alone, truth beside prediction, or as an animation."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import GifImagePlugin, Image, ImageDraw, ImageFont

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
SLOWEST_FPS, FASTEST_FPS = 0.002, 100.0
LONGEST_MS = 655_350
"""Longest duration of a GIF frame."""
SAMPLED_PIXELS = 2**15
"""Most pixels of one picture that are used for a palette."""
TRANSPARENT = 255
"""Its index in an animation's palette."""


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


def save_animation(
    frames: Iterable[Image.Image], path: Path, *, sample: Iterable[Image.Image], fps: float
) -> None:
    """Write an endless GIF frame by frame; only a frame and the one before it are held. All frames share one
    palette, so colours don't flicker: COLOURS and white exactly, the rest from `sample`. A frame equal to the
    one before it makes that one last longer.

    Raises ValueError without frames, and for a rate that a GIF can't have.
    """
    check_fps(fps)
    palette = _palette(sample)
    frame_ms = round(1000 / fps)
    with path.open("wb") as file:
        before: np.ndarray | None = None
        waiting: dict[str, Any] = {}  # the last frame, written once its duration is known
        for frame in frames:
            indexed = frame.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
            pixels = np.asarray(indexed)
            if before is None:
                file.writelines(_header(indexed))
                waiting = {"im": indexed, "offset": (0, 0), "duration": frame_ms}
            elif (changed := pixels != before).any() or waiting["duration"] + frame_ms > LONGEST_MS:
                file.writelines(GifImagePlugin.getdata(**waiting))
                part, corner = _changes(pixels, changed)
                waiting = {"im": part, "offset": corner, "duration": frame_ms, "transparency": TRANSPARENT}
            else:
                waiting["duration"] += frame_ms
            before = pixels
        if not waiting:
            raise ValueError(f"no frames for {path}")
        file.writelines(GifImagePlugin.getdata(**waiting))
        file.write(b";")


def check_fps(fps: float) -> None:
    """Raise ValueError for a rate that a GIF can't have: it counts hundredths of a second, in 16 bits."""
    if not SLOWEST_FPS <= fps <= FASTEST_FPS:
        raise ValueError(
            f"fps {fps:g}: a GIF shows {SLOWEST_FPS} to {FASTEST_FPS:g} frames a second; give a rate "
            "between them"
        )


def _palette(sample: Iterable[Image.Image]) -> Image.Image:
    """Return a palette of at most 255 colours. Large pictures are thinned to SAMPLED_PIXELS or fewer each."""
    thin = []
    for picture in sample:
        step = math.ceil(math.sqrt(picture.width * picture.height / SAMPLED_PIXELS))
        # a view would hold the picture
        thin.append(np.asarray(picture.convert("RGB"))[::step, ::step].copy())
    fixed = [*COLOURS, (255, 255, 255)]
    adapted = Image.fromarray(np.concatenate(thin)).quantize(TRANSPARENT - len(fixed)).getpalette("RGB")
    palette = Image.new("P", (1, 1))
    palette.putpalette([*(adapted or []), *(level for colour in fixed for level in colour)])
    return palette


def _header(first: Image.Image) -> list[bytes]:
    """Return the header, with a palette of all 256 entries including TRANSPARENT."""
    canvas = Image.new("P", first.size)
    levels = first.getpalette("RGB") or []
    canvas.putpalette(levels + [0] * (768 - len(levels)))
    return GifImagePlugin.getheader(canvas, info={"loop": 0})[0]


def _changes(pixels: np.ndarray, changed: Bool[np.ndarray, "H W"]) -> tuple[Image.Image, tuple[int, int]]:
    """Return the part of a frame that differs from the one before it (one pixel if nothing differs), with
    unchanged pixels transparent, which halves the file; and its upper left corner (x, y)."""
    rows, columns = (
        np.flatnonzero(changed.any(axis)) if changed.any() else np.zeros(1, int) for axis in (1, 0)
    )
    part = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    shown = np.where(changed[part], pixels[part], np.uint8(TRANSPARENT))
    return Image.fromarray(shown, "P"), (int(columns[0]), int(rows[0]))


def _grown(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """Grow a mask by the four neighbours of every pixel."""
    padded = np.pad(mask, 1)
    return padded[1:-1, 1:-1] | padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]


def _eroded(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    return ~_grown(~mask)
