"""How much memory a video takes, by number of frames: `Sa2VA.follow` frame by frame on files and on an MP4,
`Sa2VA.predict` with all of it, the command `ans predict` on a folder of frames and on an MP4, and SAM2 alone:
the command `ans track` (way track) and the `sam2` package's video predictor with the same weights, clip and
boxes (way stock).

    python perf/streaming.py [--model runs/tiny/model] [--frames 100 1000] [--ways follow follow_mp4 predict folder mp4 track stock]

Every measurement is a process of its own: bytes that are no file's, over those before the video. The process
has answered about 16 frames by then; a command loads its model once more. `--model` of track and stock may be
any SAM2. They follow two boxes; `ans track` writes every frame's masks and the overlay, the stock predictor's
masks are thresholded and dropped.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
from peak import watched
from PIL import Image

from ans_core import prompts
from ans_core.data.clips import draw_clip
from ans_core.inference.answer import save_video

DRAWN = 32
"""Frames, again from the start in a longer video."""
SIDE = 128
SIZES = {"follow": (SIDE, SIDE), "predict": (SIDE, SIDE)} | dict.fromkeys(
    ("follow_mp4", "folder", "mp4", "track", "stock"), (640, 360)
)
BOXES = ((60, 40, 300, 200), (320, 100, 560, 330))
"""Objects that `track` and `stock` follow: x0, y0, x1, y1 in frame 0."""
TEXT = prompts.VIDEO_EVAL.format(text="the circle")
Answer = Callable[[Path], tuple[str, int]]
"""Folder of frames -> what is said, and how many masks of objects are drawn."""


def write_video(folder: Path, frames: int, size: tuple[int, int]) -> None:
    """Every frame as a JPEG, as the stock predictor needs it, those after the first DRAWN as links, and all
    as an MP4 beside the folder."""
    folder.mkdir()
    drawn = draw_clip(seed=7, split="val", index=3, image_size=SIDE, frames=DRAWN).frames
    pictures = [Image.fromarray(frame).resize(size) for frame in drawn]
    for number in range(frames):
        file = folder / f"{number:05d}.jpg"
        if number < DRAWN:
            pictures[number].save(file, quality=95)
        else:
            file.symlink_to(folder / f"{number % DRAWN:05d}.jpg")
    save_video((pictures[number % DRAWN] for number in range(frames)), folder.with_suffix(".mp4"), fps=8)


def measured(model: str, folder: Path, way: str) -> None:
    answer = answerer(model, folder.parent, way)
    answer(folder.with_name("short"))
    start_s = time.monotonic()
    with watched() as peak:
        said, drawn = answer(folder)
    frames = len(list(folder.iterdir()))
    frame_ms = (time.monotonic() - start_s) / frames * 1000
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = f"{peak.grown / 1e6:.0f} MB (the whole process: {resident / 1e6:.0f})"
    print(f"{way}, {frames} frames: {memory}, {frame_ms:.0f} ms a frame ({drawn} masks, {said!r})")


def answerer(model: str, folder: Path, way: str) -> Answer:
    """Load what a way needs before the video. `folder` is where it may write."""
    if way in ("folder", "mp4", "track"):
        return lambda video: command(
            video if way != "mp4" else video.with_suffix(".mp4"), model, folder / "out", track=way == "track"
        )
    if way == "stock":
        return stock(model, folder)
    from ans_core.inference.sa2va import Sa2VA

    loaded = Sa2VA.from_pretrained(model)

    def answer(folder: Path) -> tuple[str, int]:
        files = sorted(folder.iterdir())
        if way == "predict":
            found = loaded.predict(text=TEXT, video=files, max_tokens=24)
            return found.text, sum(len(mask) for mask in found.masks)
        said, masks = loaded.follow(
            text=TEXT, video=files if way == "follow" else folder.with_suffix(".mp4"), max_tokens=24
        )
        return said, sum(len(mask) for _, mask in masks)

    return answer


def command(source: Path, model: str, out: Path, *, track: bool) -> tuple[str, int]:
    """Run `ans track` or `ans predict`."""
    from flows import cli

    asked = (
        [word for box in BOXES for word in ("--box", ",".join(map(str, box)))]
        if track
        else [TEXT, "--max-tokens", "24"]
    )
    with redirect_stdout(StringIO()) as printed:
        given = cli.parse(
            ["track" if track else "predict", str(source), *asked, "--model", model, "--out", str(out)]
        )
        given.function(given)
    said = "" if track else printed.getvalue().splitlines()[-2]
    return said, len(list((out / "masks").iterdir())) * (len(BOXES) if track else 1)


def stock(model: str, folder: Path) -> Answer:
    import torch
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from ans_core.checkpoints import sam2 as sam2_files

    sam2 = sam2_files.load(model)
    sam2_files.save(sam2, folder / "sam2", metadata={})
    predictor = instantiate(OmegaConf.load(folder / "sam2" / sam2_files.STOCK).model).eval()
    predictor.load_state_dict(sam2.state_dict())

    def answer(video: Path) -> tuple[str, int]:
        drawn = 0
        with torch.inference_mode():
            state = predictor.init_state(str(video))
            for number, box in enumerate(BOXES):
                predictor.add_new_points_or_box(
                    state, frame_idx=0, obj_id=number, box=np.array(box, np.float32)
                )
            for _, _, logits in predictor.propagate_in_video(state):
                drawn += len((logits[:, 0] > 0).numpy())
        return "", drawn

    return answer


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="runs/tiny/model")
    options.add_argument("--frames", type=int, nargs="+", default=[100, 1000])
    options.add_argument("--ways", nargs="+", choices=SIZES, default=list(SIZES))
    options.add_argument("--measure", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        folder, way = given.measure
        measured(given.model, Path(folder), way)
        return
    for way in given.ways:
        for frames in given.frames:
            with tempfile.TemporaryDirectory() as folder:
                write_video(Path(folder, "short"), 16, SIZES[way])
                write_video(Path(folder, "video"), frames, SIZES[way])
                command = [
                    sys.executable,
                    __file__,
                    "--model",
                    given.model,
                    "--measure",
                    str(Path(folder, "video")),
                    way,
                ]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
