"""How much memory a video takes: `Sa2VA.follow` frame by frame, and `Sa2VA.predict` with all of it, by number of frames.

    python perf/streaming.py [--model runs/tiny/model] [--frames 100 1000]

Every measurement is a process of its own: bytes that are no file's, over those before the video.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peak import watched
from PIL import Image

from ans_core import prompts
from ans_core.data.clips import draw_clip

SIDE = 128


def measured(model: str, folder: Path, frames: int, way: str) -> None:
    from ans_core.model import Sa2VA

    loaded = Sa2VA.from_pretrained(model)
    video = sorted(folder.iterdir())
    text = prompts.VIDEO_EVAL.format(text="the circle")
    loaded.predict(text=text, video=video[:16], max_tokens=24)
    start_s = time.monotonic()
    shown = [video[i % len(video)] for i in range(frames)]
    with watched() as peak:
        if way == "follow":
            said, masks = loaded.follow(text=text, video=shown, max_tokens=24)
            drawn = sum(len(mask) for _, mask in masks)
        else:
            answer = loaded.predict(text=text, video=shown, max_tokens=24)
            said, drawn = answer.text, sum(len(mask) for mask in answer.masks)
    took_s = time.monotonic() - start_s
    print(f"{way}, {frames} frames: {peak.grown / 1e6:.0f} MB, {took_s / frames * 1000:.0f} ms a frame ({drawn} masks, {said!r})")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="runs/tiny/model")
    options.add_argument("--frames", type=int, nargs="+", default=[100, 1000])
    options.add_argument("--measure", nargs=3, metavar=("FOLDER", "FRAMES", "WAY"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        folder, frames, way = given.measure
        measured(given.model, Path(folder), int(frames), way)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, frame in enumerate(draw_clip(seed=7, split="val", index=3, image_size=SIDE, frames=32).frames):
            Image.fromarray(frame).save(Path(folder) / f"{number:05d}.png")
        for way in ("follow", "predict"):
            for frames in given.frames:
                command = [sys.executable, __file__, "--model", given.model, "--measure", folder, str(frames), way]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
