"""A picture -> its lines of text with boxes and confidences: by PP-OCRv6 (the package rapidocr), or by
templates of drawn digits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, get_args

import numpy as np
from PIL import Image

from ans_core.agent.workspace import Box
from ans_core.config.names import Reader

ENLARGED: dict[str, tuple[int, int]] = {"rapidocr": (960, 2), "template": (480, 4)}
"""Longer side that small pictures are enlarged to, and how many times at most. rapidocr: of letters of 16 px
on photographs .84 are read where pictures of 640 stay as they are, .97 at 960 (LOG 2026-11-27). template:
digits of 10 px are read right when enlarged 3 times."""
LONGEST_SIDE = 1536
"""That text is detected at; larger pictures are made smaller. (The package's own rule, 736 for the shorter
side, blows up flat crops of letters until they fall apart: .40 of the characters of turned lines were read
so, 1.00 as they are.)"""
TURNED = 0.98
"""Certainty from which a line is taken to be upside down (the package: .9, which turned an upright line in
one of ten pictures)."""
SAME_ROW = 0.5
"""Two lines are side by side if their centres are closer, vertically, than this share of the lower one's
height."""


@dataclass(frozen=True, kw_only=True)
class Line:
    text: str
    box: Box
    """Pixels of the picture; of turned text, the upright box around it."""
    confidence: float
    """0..1."""


def check_reader(reader: str, *, setting: str = "agent.reader") -> None:
    """Raise ValueError for a reader that does not exist or is not installed. `setting`: what names the
    reader, for the message."""
    if reader not in get_args(Reader):
        raise ValueError(f"{setting}: no reader named {reader!r}; there are {', '.join(get_args(Reader))}")
    if reader == "rapidocr" and (missing := not_installed()):
        raise ValueError(
            f"{setting}: READ_TEXT reads by rapidocr; to be installed: {', '.join(missing)}; `pip install "
            "-e '.[ocr]'`, or take the reader `template`, which knows the digits of drawn scenes alone"
        )


def not_installed() -> list[str]:
    """Return the packages that rapidocr needs and that are not there."""
    return [name for name in ("rapidocr", "onnxruntime") if find_spec(name) is None]


def load(reader: str) -> None:
    """Load what a reader keeps for this process. Raises ValueError if it is not installed."""
    if reader == "rapidocr":
        _engine()


def read_lines(picture: Image.Image, *, by: str) -> list[Line]:
    """Return lines in reading order: from row to row, in a row from left to right. Lines without a letter are
    left out. Raises ValueError if the reader is not installed."""
    up_to, most = ENLARGED[by]
    scale = float(np.clip(up_to / max(picture.size), 1, most))
    size = (round(picture.width * scale), round(picture.height * scale))
    large = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    if by == "template":
        from ans_core.agent.ocr_templates import by_templates

        lines = by_templates(np.asarray(large.convert("L"), np.float32))
        return sorted(
            (_shrunk(line, scale, picture) for line in lines), key=lambda line: (line.box[1], line.box[0])
        )
    return in_reading_order([_shrunk(line, scale, picture) for line in _rapid(large)])


def in_reading_order(lines: Sequence[Line]) -> list[Line]:
    """Sort lines from row to row; one that is a little higher than the line to its left stays in its row."""
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: line.box[1] + line.box[3]):
        last = rows[-1][-1].box if rows else None
        lower = min(line.box[3] - line.box[1], last[3] - last[1]) if last else 0
        if last and (line.box[1] + line.box[3] - last[1] - last[3]) / 2 < SAME_ROW * lower:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows for line in sorted(row, key=lambda line: line.box[0])]


def _shrunk(line: Line, scale: float, picture: Image.Image) -> Line:
    """Bring a line of the enlarged picture back to the picture."""
    x1, y1, x2, y2 = (round(v / scale) for v in line.box)
    return replace(line, box=(max(0, x1), max(0, y1), min(picture.width, x2), min(picture.height, y2)))


@lru_cache(maxsize=1)
def _engine() -> Any:
    """Load the three networks (detection, upright or upside down, recognition), which the wheel holds: 1.5 s,
    once a process."""
    check_reader("rapidocr")
    from rapidocr import RapidOCR  # an optional extra

    return RapidOCR(
        params={
            "Global.log_level": "error",
            "EngineConfig.onnxruntime.intra_op_num_threads": _threads(),
            "Det.limit_type": "max",
            "Det.limit_side_len": LONGEST_SIDE,
            "Cls.cls_thresh": TURNED,
        }
    )


def _threads() -> int:
    """As OMP_NUM_THREADS says, which may be a list by level of nesting (`4,2`); -1, all cores, without it."""
    return int((os.environ.get("OMP_NUM_THREADS") or "-1").split(",")[0])


def _rapid(picture: Image.Image) -> list[Line]:
    detections = _engine()(np.asarray(picture)[..., ::-1])  # BGR
    if detections.boxes is None:
        return []
    lines = []
    for corners, text, score in zip(detections.boxes, detections.txts, detections.scores, strict=True):
        (x1, y1), (x2, y2) = np.floor(corners.min(0)), np.ceil(corners.max(0))
        if any(letter.isalnum() for letter in text):
            lines.append(
                Line(text=text.strip(), box=(int(x1), int(y1), int(x2), int(y2)), confidence=float(score))
            )
    return lines
