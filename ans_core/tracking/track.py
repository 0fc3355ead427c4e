"""Follow objects through a video: prompts from the command line in; palette PNGs, an MP4 and track.json out, in
flat memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from ans_core.checkpoints import sam2 as sam2_files
from ans_core.checkpoints.checkpoint import present_device
from ans_core.inference.answer import check, check_fps, coordinates, read_mask, remove, save_video
from ans_core.pictures import media, overlay, rle, transforms
from ans_core.tracking.follow import ObjectPrompt, check_prompts, frame_logits, label_map
from ans_core.types import ImageRef

MOST = 255
"""Objects that a palette PNG tells apart; 0 is none of them."""
SIDE = 32
"""SAM2's image encoder halves a picture five times."""
TOLD = "track.json"
SHOWN = "overlay.mp4"
PromptArgument = tuple[str, str, int]
"""A prompt as written: kind, value, frame."""


def write_track(
    source: Path,
    arguments: Sequence[PromptArgument],
    *,
    checkpoint: str,
    out: Path,
    image_size: int,
    device: str,
    fps: float,
) -> str:
    """Follow the objects and return what to print. Object n of the prompts is n in the PNGs; where objects
    overlap, the surer one counts.

    Raises ValueError for prompts, videos and sizes that make no sense, and where others' files stand in the
    way, before a model is loaded.
    """
    check_fps(fps)
    if image_size < 0 or image_size % SIDE:
        raise ValueError(
            f"--image-size {image_size}: give a multiple of {SIDE}, or leave it out for the checkpoint's"
        )
    place = present_device(device)
    frames = media.clip(source)
    prompts = read_prompts(arguments)
    numbered = enumerate(arguments, start=1)
    check_prompts(
        prompts, frames, where=[f"object {n} (--{kind} {value})" for n, (kind, value, _) in numbered]
    )
    folder, old = out / "masks", _former(out)
    _check_files(source, arguments, frames, out, old)
    sam2 = sam2_files.load(checkpoint, image_size=image_size, device=place)
    folder.mkdir(parents=True, exist_ok=True)
    remove(old)
    # the masks of a killed run are this command's, too
    (out / TOLD).write_text(json.dumps({"frames": len(frames)}))
    pixels = [0] * len(prompts)

    def overlays() -> Iterator[Image.Image]:
        tracked = tqdm(frame_logits(sam2, frames, prompts), total=len(frames), desc="frames")
        for index, logits in enumerate(tracked):
            labels = label_map(logits)
            overlay.index_picture(labels).save(folder / _name(index))
            masks = [rle.encode(labels == n) for n in range(1, len(prompts) + 1)]
            for n, mask in enumerate(masks):
                pixels[n] += rle.area(mask)
            yield overlay.draw(transforms.open_image(frames[index]), masks)

    save_video(overlays(), out / SHOWN, fps=fps)
    record = {
        "source": str(source),
        "checkpoint": checkpoint,
        "frames": len(frames),
        "prompts": [list(one) for one in arguments],
        "pixels": pixels,
    }
    (out / TOLD).write_text(json.dumps(record, indent=1) + "\n")
    return f"{len(prompts)} objects in {len(frames)} frames: {folder}, {out / SHOWN}, {out / TOLD}"


def _check_files(
    source: Path,
    arguments: Sequence[PromptArgument],
    frames: Sequence[ImageRef],
    out: Path,
    old: Sequence[Path],
) -> None:
    """Raise ValueError where what is to be written would replace what is read, or a file of somebody else."""
    paths = (
        [] if isinstance(frames, media.VideoFile) else [frame for frame in frames if isinstance(frame, Path)]
    )
    masks = [Path(value) for kind, value, _ in arguments if kind == "mask"]
    check([source, *paths, *masks], paths, old, earlier="an earlier `ans track`")
    pictures = (out / "masks" / _name(index) for index in range(len(frames)))
    written = [*pictures, out / TOLD, out / SHOWN]
    if foreign := [path for path in written if path.exists() and path not in old]:
        raise ValueError(
            f"{foreign[0]} is not what an earlier `ans track` wrote, and would be replaced; give another "
            "--out"
        )


def _name(index: int) -> str:
    return f"{index:05d}.png"


def _former(out: Path) -> list[Path]:
    """List what an earlier run left in this folder, by its track.json."""
    try:
        count = int(json.loads((out / TOLD).read_text(encoding="utf-8"))["frames"])
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
        return []
    masks = (out / "masks" / _name(index) for index in range(count))
    return [path for path in (*masks, out / SHOWN, out / TOLD) if path.is_file()]


def read_prompts(arguments: Sequence[PromptArgument]) -> list[ObjectPrompt]:
    """Read the prompts. Raises ValueError for numbers that are none, unreadable masks, and more objects than
    a PNG can tell apart."""
    if not arguments:
        raise ValueError(
            "nothing to follow: give --point X,Y or --box X0,Y0,X1,Y1 or --mask FILE, once for each object"
        )
    if len(arguments) > MOST:
        raise ValueError(
            f"{len(arguments)} objects are more than the {MOST} that a palette PNG tells apart; follow them "
            "in two runs"
        )
    return [_prompt(kind, value, frame) for kind, value, frame in arguments]


def _prompt(kind: str, value: str, frame: int) -> ObjectPrompt:
    if kind == "mask":
        return ObjectPrompt(mask=read_mask(value), frame=frame)
    numbers = coordinates(kind, value)
    if kind == "box":
        return ObjectPrompt.box(numbers, frame=frame)
    return ObjectPrompt(points=((numbers[0], numbers[1]),), labels=(1,), frame=frame)


def default_checkpoint(model: Path) -> str:
    """Return what the stage `memory` made of a SAM2 alone, if it lies beside the pipeline's model, else that
    model."""
    alone = model.parent / "memory/sam2"
    return str(alone if alone.is_dir() else model)
