"""Follow objects through a video: prompts from the command line in; palette PNGs, an animation and track.json out, in flat memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from ans_core import dist, media, overlay, rle, transforms
from ans_core.checkpoints import sam2 as sam2_files
from ans_core.model.masks import upsample_logits
from ans_core.tracking.follow import ObjectPrompt, follow, label_map
from flows.answer import coordinates, save_video

MOST = 255
"""Objects that a palette PNG tells apart; 0 is none of them."""
Given = tuple[str, str, int]
"""A prompt as written: kind, value, frame."""


def write_track(
    source: Path, given: Sequence[Given], *, checkpoint: str, out: Path, image_size: int, device: str, gif: bool, fps: float
) -> str:
    """Follow the objects and return what to print. Object n of the prompts is n in the PNGs; where objects overlap, the surer one counts.

    Raises ValueError for prompts and videos that make no sense, before a model is loaded.
    """
    overlay.check_fps(fps)
    frames = media.clip(source)
    width, height = transforms.image_size(frames[0])
    prompts = read_prompts(given)
    for number, (prompt, (kind, value, _)) in enumerate(zip(prompts, given, strict=True), start=1):
        prompt.check(width=width, height=height, frames=len(frames), where=f"object {number} (--{kind} {value})")
    sam2 = sam2_files.load(checkpoint, image_size=image_size, device=dist.pick_device(device))
    folder = out / "masks"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("[0-9]*.png"):
        old.unlink()
    pixels = [0] * len(prompts)

    def drawn() -> Iterator[Image.Image]:
        found = follow(sam2, lambda index: transforms.open_image(frames[index]), prompts, frames=len(frames))
        for index, low in tqdm(found, total=len(frames), desc="frames"):
            labels = label_map(np.stack([upsample_logits(z, size=sam2.image_size, height=height, width=width) for z in low]))
            overlay.index_picture(labels).save(folder / f"{index:05d}.png")
            masks = [labels == n for n in range(1, len(prompts) + 1)]
            for n, mask in enumerate(masks):
                pixels[n] += int(mask.sum())
            yield overlay.draw(transforms.open_image(frames[index]), [rle.encode(mask) for mask in masks])

    shown = out / ("overlay.gif" if gif else "overlay.mp4")
    if gif:
        overlay.save_animation(drawn(), shown, sample=[transforms.open_image(frames[0])], fps=fps)
    else:
        save_video(drawn(), shown, fps=fps)
    told = {
        "source": str(source),
        "checkpoint": checkpoint,
        "frames": len(frames),
        "prompts": [list(one) for one in given],
        "pixels": pixels,
    }
    (out / "track.json").write_text(json.dumps(told, indent=1) + "\n")
    return f"{len(prompts)} objects in {len(frames)} frames: {folder}, {shown}, {out / 'track.json'}"


def read_prompts(given: Sequence[Given]) -> list[ObjectPrompt]:
    """Read the prompts. Raises ValueError for numbers that are none, unreadable masks, and more objects than a PNG can tell apart."""
    if not given:
        raise ValueError("nothing to follow: give --point X,Y or --box X0,Y0,X1,Y1 or --mask FILE, once for each object")
    if len(given) > MOST:
        raise ValueError(f"{len(given)} objects are more than the {MOST} that a palette PNG tells apart; follow them in two runs")
    return [_prompt(kind, value, frame) for kind, value, frame in given]


def _prompt(kind: str, value: str, frame: int) -> ObjectPrompt:
    if kind == "mask":
        try:
            return ObjectPrompt(mask=np.asarray(Image.open(value).convert("L")) > 0, frame=frame)
        except UnidentifiedImageError as error:
            raise ValueError(f"--mask {value} is no picture") from error
    numbers = coordinates(kind, value)
    if kind == "box":
        return ObjectPrompt.box(numbers, frame=frame)
    return ObjectPrompt(points=((numbers[0], numbers[1]),), labels=(1,), frame=frame)


def default_checkpoint(model: Path) -> str:
    """Return what the stage `memory` made of a SAM2 alone, if it lies beside the pipeline's model, else that model."""
    alone = model.parent / "memory/sam2"
    return str(alone if alone.is_dir() else model)
