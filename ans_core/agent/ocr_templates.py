"""A grey picture -> lines of digits, by correlation with templates: what the drawn world is read with. It
knows no letters."""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Bool, Float
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from ans_core.agent.ocr import Line
from ans_core.agent.workspace import Box

LEVELS = 8
"""Thresholds that letters are looked for at, in both polarities."""
ALPHABET = "0123456789"
FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf")
"""Of matplotlib, beside Pillow's own, which the drawn world writes with: there this reader is an upper bound,
no independent witness."""
CELL = 24
"""Side of a template."""
LEAST_SCORE = 0.72
"""Correlation with the nearest template from which a spot is a digit."""
LEAST_CONTRAST = 25.0
"""Of a digit to what surrounds it, in grey levels (0..255)."""
LEAST_HEIGHT = 10
"""Pixels of a digit after enlargement."""


def by_templates(grey: Float[np.ndarray, "H W"]) -> list[Line]:
    """Digits: spots that are darker or brighter than a threshold, each correlated with templates; the best of
    overlapping ones stay."""
    candidates: list[Line] = []
    for level in np.linspace(grey.min(), grey.max(), LEVELS + 2)[1:-1]:
        for spots in (grey < level, grey > level):
            candidates += _letters(grey, spots)
    letters: list[Line] = []
    for letter in sorted(candidates, key=lambda one: -one.confidence):
        if all(_shared(letter.box, other.box) < 0.3 for other in letters):
            letters.append(letter)
    return _lines(letters)


def _letters(grey: Float[np.ndarray, "H W"], spots: Bool[np.ndarray, "H W"]) -> list[Line]:
    """Each letter as a line of its own."""
    height, width = spots.shape
    labels, _ = ndimage.label(spots, np.ones((3, 3)))
    boxes, cells = [], []
    for number, place in enumerate(ndimage.find_objects(labels), start=1):
        y1, y2, x1, x2 = place[0].start, place[0].stop, place[1].start, place[1].stop
        tall, wide = y2 - y1, x2 - x1
        inside = x1 > 0 and y1 > 0 and x2 < width and y2 < height
        if not (inside and LEAST_HEIGHT <= tall <= 0.8 * height and 0.15 * tall <= wide <= tall):
            continue
        shape, here = labels[place] == number, grey[place]
        if shape.all() or abs(float(here[shape].mean()) - float(here[~shape].mean())) < LEAST_CONTRAST:
            continue
        paper = float(np.median(here[~shape]))
        ink = float(here[shape].max() if here[shape].mean() > paper else here[shape].min())
        boxes.append((x1, y1, x2, y2))
        # grey tells a 3 from an 8 where the threshold closes its gaps
        cells.append(_cell(np.clip((here - paper) / (ink - paper), 0, 1)))
    if not cells:
        return []
    names, templates = _templates()
    scores = np.stack(cells) @ templates.T  # (P, T)
    best = scores.argmax(1)
    rated = zip(boxes, best, scores.max(1), strict=True)
    return [
        Line(text=names[i], box=box, confidence=float(score))
        for box, i, score in rated
        if score >= LEAST_SCORE
    ]


def _cell(ink: Float[np.ndarray, "h w"]) -> Float[np.ndarray, " D"]:
    """0 = paper, 1 = ink. Brought to one height, aspect kept, in the middle of a square; zero mean and unit
    length."""
    wide = max(1, min(CELL, round(CELL * ink.shape[1] / ink.shape[0])))
    small = Image.fromarray((255 * ink).astype(np.uint8)).resize((wide, CELL), Image.Resampling.BOX)
    cell = np.zeros((CELL, CELL), np.float32)
    left = (CELL - wide) // 2
    cell[:, left : left + wide] = np.asarray(small)
    flat = cell.ravel() - cell.mean()
    return flat / max(float(np.linalg.norm(flat)), 1e-6)


@lru_cache(maxsize=1)
def _templates() -> tuple[list[str], Float[np.ndarray, "T D"]]:
    folder = Path(matplotlib.get_data_path()) / "fonts/ttf"
    names, cells = [], []
    for font in [
        ImageFont.load_default(size=96),
        *(ImageFont.truetype(str(folder / file), 96) for file in FONTS),
    ]:
        for letter in ALPHABET:
            canvas = Image.new("L", (160, 160))
            ImageDraw.Draw(canvas).text((80, 80), letter, fill=255, font=font, anchor="mm")
            box = canvas.getbbox()
            assert box is not None, f"the font has no {letter}"
            names.append(letter)
            cells.append(_cell(np.asarray(canvas.crop(box), np.float32) / 255))
    return names, np.stack(cells)


def _shared(one: Box, other: Box) -> float:
    """Common area, as a share of the smaller box."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    smaller = min((b[2] - b[0]) * (b[3] - b[1]) for b in (one, other))
    return max(0, wide) * max(0, high) / smaller


def _height(letter: Line) -> int:
    return letter.box[3] - letter.box[1]


def _lines(letters: list[Line]) -> list[Line]:
    """Letters of about one height, side by side."""
    rows: list[list[Line]] = []
    for letter in sorted(letters, key=lambda one: one.box[0]):
        for row in rows:
            last, height = row[-1], _height(row[-1])
            alike = 0.75 < _height(letter) / height < 1.33
            level = abs(letter.box[1] + letter.box[3] - last.box[1] - last.box[3]) < 0.5 * height
            if alike and level and letter.box[0] - last.box[2] < 1.5 * height:
                row.append(letter)
                break
        else:
            rows.append([letter])
    lines = []
    for row in rows:
        text = row[0].text
        for before, letter in itertools.pairwise(row):
            text += (" " if letter.box[0] - before.box[2] > 0.5 * _height(before) else "") + letter.text
        corners = np.array([letter.box for letter in row])
        (x1, y1), (x2, y2) = corners[:, :2].min(0).tolist(), corners[:, 2:].max(0).tolist()
        lines.append(
            Line(
                text=text,
                box=(x1, y1, x2, y2),
                confidence=float(np.mean([letter.confidence for letter in row])),
            )
        )
    return lines
