"""How much memory a video takes, by number of frames: `Sa2VA.follow` frame by frame on files and on an MP4, `Sa2VA.predict` with all of it,
and the command `ans predict` on a folder of frames and on an MP4.

    python perf/streaming.py [--model runs/tiny/model] [--frames 100 1000] [--ways follow follow_mp4 predict folder mp4]

Every measurement is a process of its own: bytes that are no file's, over those before the video. The command has answered about 16 frames
by then, and loads its model once more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from peak import watched
from PIL import Image

from ans_core import prompts
from ans_core.data.clips import draw_clip
from flows.answer import save_video

DRAWN = 32
"""Frames, again from the start in a longer video."""
SIDE = 128
SIZES = {"follow": (SIDE, SIDE), "follow_mp4": (640, 360), "predict": (SIDE, SIDE), "folder": (640, 360), "mp4": (640, 360)}


def write_video(folder: Path, frames: int, size: tuple[int, int]) -> None:
    """Every frame as a file, those after the first DRAWN as links, and all as an MP4 beside the folder."""
    folder.mkdir()
    drawn = draw_clip(seed=7, split="val", index=3, image_size=SIDE, frames=DRAWN).frames
    pictures = [Image.fromarray(frame).resize(size) for frame in drawn]
    for number in range(frames):
        file = folder / f"{number:05d}.png"
        if number < DRAWN:
            pictures[number].save(file)
        else:
            file.symlink_to(folder / f"{number % DRAWN:05d}.png")
    save_video((pictures[number % DRAWN] for number in range(frames)), folder.with_suffix(".mp4"), fps=8)


def measured(model: str, folder: Path, way: str) -> None:
    from ans_core.model import Sa2VA

    text = prompts.VIDEO_EVAL.format(text="the circle")
    video = sorted(folder.iterdir())
    if way in ("folder", "mp4"):
        answered(folder.with_name("short"), text, model, folder.parent)
        start_s = time.monotonic()
        with watched() as peak:
            said = answered(folder if way == "folder" else folder.with_suffix(".mp4"), text, model, folder.parent)
        drawn = len(list((folder.parent / "out/masks").iterdir()))
    else:
        loaded = Sa2VA.from_pretrained(model)
        loaded.predict(text=text, video=video[:16], max_tokens=24)
        start_s = time.monotonic()
        with watched() as peak:
            if way.startswith("follow"):
                said, masks = loaded.follow(text=text, video=video if way == "follow" else folder.with_suffix(".mp4"), max_tokens=24)
                drawn = sum(len(mask) for _, mask in masks)
            else:
                answer = loaded.predict(text=text, video=video, max_tokens=24)
                said, drawn = answer.text, sum(len(mask) for mask in answer.masks)
    took_s = time.monotonic() - start_s
    frame_ms = took_s / len(video) * 1000
    print(f"{way}, {len(video)} frames: {peak.grown / 1e6:.0f} MB, {frame_ms:.0f} ms a frame ({drawn} masks, {said!r})")


def answered(source: Path, text: str, model: str, folder: Path) -> str:
    """What the command says."""
    from flows import cli

    with redirect_stdout(StringIO()) as printed:
        asked = cli.parse(["predict", str(source), text, "--model", model, "--max-tokens", "24", "--out", str(folder / "out")])
        asked.function(asked)
    return printed.getvalue().splitlines()[-2]


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
                command = [sys.executable, __file__, "--model", given.model, "--measure", str(Path(folder, "video")), way]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
