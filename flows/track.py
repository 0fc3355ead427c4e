"""Follow objects through a video: prompts from the command line in; palette PNGs, an animation and track.json out, in flat memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from ans_core import dist, media, overlay, rle, transforms
from ans_core.checkpoints import sam2 as sam2_files
from ans_core.model.masks import upsample_logits
from ans_core.tracking.follow import ObjectPrompt, follow, label_map
from flows.answer import coordinates, save_video

MOST = 255
"""Objects that a palette PNG tells apart; 0 is none of them."""
SIDE = 32
"""SAM2's image encoder halves a picture five times."""
TOLD = "track.json"
Given = tuple[str, str, int]
"""A prompt as written: kind, value, frame."""


def write_track(
    source: Path, given: Sequence[Given], *, checkpoint: str, out: Path, image_size: int, device: str, gif: bool, fps: float
) -> str:
    """Follow the objects and return what to print. Object n of the prompts is n in the PNGs; where objects overlap, the surer one counts.

    Raises ValueError for prompts, videos and sizes that make no sense, and where others' files stand in the way, before a model is loaded.
    """
    overlay.check_fps(fps)
    if image_size < 0 or image_size % SIDE:
        raise ValueError(f"--image-size {image_size}: give a multiple of {SIDE}, or leave it out for the checkpoint's")
    frames = media.clip(source)
    width, height = transforms.image_size(frames[0])
    paths = [] if isinstance(frames, media.VideoFile) else [frame for frame in frames if isinstance(frame, Path)]
    _check_sizes(paths)
    prompts = read_prompts(given)
    for number, (prompt, (kind, value, _)) in enumerate(zip(prompts, given, strict=True), start=1):
        prompt.check(width=width, height=height, frames=len(frames), where=f"object {number} (--{kind} {value})")
    folder = out / "masks"
    old = _former(out)
    _check_place(folder, old, len(frames), [source, *paths, *(Path(value) for kind, value, _ in given if kind == "mask")])
    sam2 = sam2_files.load(checkpoint, image_size=image_size, device=dist.pick_device(device))
    folder.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.unlink()
    (out / TOLD).write_text(json.dumps({"frames": len(frames)}))  # the masks of a killed run are this command's, too
    pixels = [0] * len(prompts)

    def drawn() -> Iterator[Image.Image]:
        found = follow(sam2, lambda index: transforms.open_image(frames[index]), prompts, frames=len(frames))
        for index, low in tqdm(found, total=len(frames), desc="frames"):
            labels = label_map(np.stack([upsample_logits(z, size=sam2.image_size, height=height, width=width) for z in low]))
            overlay.index_picture(labels).save(folder / _name(index))
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
    (out / TOLD).write_text(json.dumps(told, indent=1) + "\n")
    return f"{len(prompts)} objects in {len(frames)} frames: {folder}, {shown}, {out / TOLD}"


def _name(index: int) -> str:
    return f"{index:05d}.png"


def _former(out: Path) -> list[Path]:
    """List the masks that an earlier run left in this folder, by its track.json."""
    try:
        count = int(json.loads((out / TOLD).read_text())["frames"])
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
        return []
    return [path for index in range(count) if (path := out / "masks" / _name(index)).is_file()]


def _check_place(folder: Path, old: Sequence[Path], frames: int, read: Sequence[Path]) -> None:
    """Refuse a folder of masks in which others' files, or what this run reads, would be replaced."""
    foreign = [path for index in range(frames) if (path := folder / _name(index)).exists() and path not in old]
    if foreign:
        raise ValueError(f"{foreign[0]} is not what an earlier `ans track` wrote, and would be replaced; give another --out")
    removed = {path.resolve() for path in old}
    if lost := [path for path in read if path.resolve() in removed]:
        raise ValueError(f"{lost[0]} is what an earlier `ans track` left there, and would be replaced; give another --out")


def _check_sizes(frames: Sequence[Path]) -> None:
    """Refuse pictures of several sizes; the frames of a video file have one."""
    for path in frames:
        if (size := transforms.image_size(path)) != (first := transforms.image_size(frames[0])):
            raise ValueError(f"{path} is {size[0]} x {size[1]}, {frames[0]} {first[0]} x {first[1]}; bring the frames to one size")


def read_prompts(given: Sequence[Given]) -> list[ObjectPrompt]:
    """Read the prompts. Raises ValueError for numbers that are none, unreadable masks, and more objects than a PNG can tell apart."""
    if not given:
        raise ValueError("nothing to follow: give --point X,Y or --box X0,Y0,X1,Y1 or --mask FILE, once for each object")
    if len(given) > MOST:
        raise ValueError(f"{len(given)} objects are more than the {MOST} that a palette PNG tells apart; follow them in two runs")
    return [_prompt(kind, value, frame) for kind, value, frame in given]


def _prompt(kind: str, value: str, frame: int) -> ObjectPrompt:
    if kind == "mask":
        return ObjectPrompt(mask=_mask(value), frame=frame)
    numbers = coordinates(kind, value)
    if kind == "box":
        return ObjectPrompt.box(numbers, frame=frame)
    return ObjectPrompt(points=((numbers[0], numbers[1]),), labels=(1,), frame=frame)


def _mask(value: str) -> Bool[np.ndarray, "H W"]:
    """Read a mask: what is not black, or the one object of a palette PNG. Raises ValueError for several of them."""
    try:
        picture = Image.open(value)
        if picture.mode != "P":
            return np.asarray(picture.convert("L")) > 0
        labels = np.asarray(picture)
    except UnidentifiedImageError as error:
        raise ValueError(f"--mask {value} is no picture") from error
    if len(objects := np.unique(labels[labels > 0])) > 1:
        raise ValueError(f"--mask {value} holds the objects {', '.join(map(str, objects))}; give one file an object")
    return labels > 0


def default_checkpoint(model: Path) -> str:
    """Return what the stage `memory` made of a SAM2 alone, if it lies beside the pipeline's model, else that model."""
    alone = model.parent / "memory/sam2"
    return str(alone if alone.is_dir() else model)
