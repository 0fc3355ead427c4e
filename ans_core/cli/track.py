"""`ans track`: a video and prompts in; every object's masks out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ans_core.cli.options import existing, newest_model, positive
from ans_core.places import root

PROMPTS = (
    (
        "point",
        "X,Y",
        "a click on an object, in pixels of the video; repeat any of these three for several objects",
    ),
    ("box", "X0,Y0,X1,Y1", "the box around an object"),
    ("mask", "FILE", "an object's mask, not black where it is"),
    ("frame", "N", "the frame of the prompt before it, counted from 0 (default: 0)"),
)


class Prompt(argparse.Action):
    """Collect --point, --box and --mask in their order as (kind, value, frame); --frame belongs to the prompt
    before it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        prompts = list(namespace.prompts or [])
        if option != "--frame":
            prompts.append((str(option).removeprefix("--"), values, 0))
        elif not prompts or not values.isdecimal():
            parser.error(f"--frame {values}: a whole number, after the prompt of that frame")
        else:
            prompts[-1] = (*prompts[-1][:2], int(values))
        namespace.prompts = prompts


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument("source", metavar="VIDEO|FOLDER", help="a video file, or a folder with the frames of one")
    for name, metavar, help_text in PROMPTS:
        it.add_argument(f"--{name}", dest="prompts", action=Prompt, metavar=metavar, help=help_text)
    it.add_argument(
        "--model", help="a SAM2 (folder, .pt or hub id) or a Sa2VA folder (default: the profile's)"
    )
    it.add_argument(
        "--image-size", type=positive, default=0, help="side of the model's image (default: the checkpoint's)"
    )
    it.add_argument("--out", metavar="FOLDER", help="where to write (default: .ans/tracks/<name>)")
    it.add_argument("--fps", type=float, default=8.0, help="of the overlay, 0.001 to 1000 (default: 8)")
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")


def run(arguments: argparse.Namespace) -> int:
    """Objects prompted by points, boxes or masks through a video: writes palette PNGs and an MP4."""
    source = existing(arguments.source, "a video file or a folder of frames")
    from ans_core.tracking.track import default_checkpoint, write_track

    summary = write_track(
        source,
        arguments.prompts or [],
        checkpoint=arguments.model or default_checkpoint(newest_model()),
        out=Path(arguments.out or root() / ".ans/tracks" / source.stem),
        image_size=arguments.image_size,
        device=arguments.device,
        fps=arguments.fps,
    )
    print(summary)
    return 0
