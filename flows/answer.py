"""A picture or a clip and a text -> a folder: answer.json (with masks as RLE), masks/*.png, and the overlay, a picture or a GIF."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from ans_core import media, overlay, rle, transforms
from ans_core.model import Sa2VA
from ans_core.model.config import VideoMode
from ans_core.types import RLE

MASK = re.compile(r"object\d+_frame\d{5,}\.png")
OVERLAYS = ("overlay.png", "overlay.gif")
SAMPLED_FRAMES = 32
"""Of a clip, evenly spread, from which the colours of its GIF come."""


def write_answer(
    source: Path, text: str, *, checkpoint: Path, out: Path, max_tokens: int, video_mode: Literal[VideoMode, "auto"], fps: float
) -> str:
    """What to tell about it. Former outputs in `out` are removed first, nothing else there. Of a clip a few frames are held at a time.

    Raises ValueError for frames that differ in size, a source that would be removed, and a rate that a GIF can't have.
    """
    overlay.check_fps(fps)
    old = former(out)
    with media.frames(source, scratch=out) as frames:
        check(source, frames, old)
        model = Sa2VA.from_pretrained(checkpoint, device_map="auto")
        mode = model.video_mode(video_mode)
        told: dict[str, object] = {"source": str(source), "asked": text}
        drawn: Iterable[tuple[int, Iterable[np.ndarray]]]
        if len(frames) > 1:
            print(f"{len(frames)} frames, video mode {mode}")
            said, drawn = model.follow(text=text, video=frames, max_tokens=max_tokens, video_mode=mode)
        else:
            answer = model.predict(text=text, image=frames[0], max_tokens=max_tokens, video_mode=mode)
            said, drawn = answer.text, [(0, [mask[0] for mask in answer.masks])]
        remove(old)
        masks = write_masks(drawn, out / "masks")
        told |= {"text": said, "masks": masks} | ({"video_mode": mode} if len(frames) > 1 else {})
        (out / "answer.json").write_text(json.dumps(told))
        picture = write_overlay(frames, masks, out, fps=fps)
    return f"{said}\n{len(masks)} masks; {picture}, {out / 'answer.json'}, {out / 'masks'}"


def former(out: Path) -> list[Path]:
    """What earlier questions left in a folder, by its names; also what a killed one had unpacked."""
    if not out.is_dir():
        return []
    masks = [path for path in out.glob("masks/*.png") if MASK.fullmatch(path.name)]
    return [*masks, *(out / name for name in ("answer.json", *OVERLAYS) if (out / name).is_file()), *out.glob(f"{media.SCRATCH}*/")]


def check(source: Path, frames: Sequence[Path], old: Sequence[Path]) -> None:
    """Before anything is computed or removed."""
    removed = {path.resolve() for path in old}
    for path in (source, *frames):
        if path.resolve() in removed:
            raise ValueError(f"{path} is what an earlier question left there, and would be removed; give another --out")
    first = transforms.image_size(frames[0])
    for path in frames[1:]:
        if (size := transforms.image_size(path)) != first:
            raise ValueError(f"{path} is {size[0]} x {size[1]}, {frames[0]} {first[0]} x {first[1]}; bring the frames to one size")


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_masks(drawn: Iterable[tuple[int, Iterable[np.ndarray]]], folder: Path) -> list[list[RLE]]:
    """By object and frame, as (index, masks (N, H, W)) come."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[list[RLE]] = []
    for frame, masks in drawn:
        found = found or [[] for _ in masks]
        for number, (mask, coded) in enumerate(zip(masks, found, strict=True), start=1):
            coded.append(rle.encode(mask))
            Image.fromarray(mask).save(folder / f"object{number}_frame{frame:05d}.png")
    return found


def write_overlay(frames: Sequence[Path], masks: Sequence[Sequence[RLE]], out: Path, *, fps: float) -> Path:
    """Every frame is opened and drawn once, and those from which the colours come once more."""

    def drawn(indices: Iterable[int]) -> Iterator[Image.Image]:
        return (overlay.draw(transforms.open_image(frames[i]), [coded[i] for coded in masks]) for i in indices)

    path = out / OVERLAYS[len(frames) > 1]
    if len(frames) > 1:
        sample = range(0, len(frames), math.ceil(len(frames) / SAMPLED_FRAMES))
        overlay.save_animation(drawn(range(len(frames))), path, sample=drawn(sample), fps=fps)
    else:
        next(drawn([0])).save(path)
    return path
