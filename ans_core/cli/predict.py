"""`ans predict`: a picture or a video and a question in; an answer with masks out."""

from __future__ import annotations

import argparse
from pathlib import Path

from ans_core.cli.options import existing, newest_model, positive
from ans_core.places import root


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "source", metavar="IMAGE|VIDEO", help="a picture, a video file, or a folder with the frames of one"
    )
    it.add_argument("text")
    it.add_argument("--model", help="checkpoint folder (default: runs/<profile>/model)")
    it.add_argument(
        "--max-tokens",
        type=positive,
        default=2048,
        help="of the answer, which is cut there (default: 2048, as in Python)",
    )
    it.add_argument(
        "--out",
        metavar="FOLDER",
        help="where to write; an earlier answer there is removed (default: .ans/predictions/<name>)",
    )
    it.add_argument(
        "--video-mode",
        choices=["auto", "sa2va", "sa2va-i", "keyframe"],
        default="auto",
        help="how masks go through a clip: docs/video.md",
    )
    it.add_argument("--fps", type=float, default=8.0, help="of a video's overlay, 0.001 to 1000 (default: 8)")
    it.add_argument(
        "--past",
        nargs=2,
        action="append",
        metavar=("QUESTION", "ANSWER"),
        help="an earlier turn; the first one first",
    )
    it.add_argument(
        "--mask",
        action="append",
        metavar="FILE",
        help="a region to ask about, not black where it is: region1, region2, ...",
    )
    it.add_argument(
        "--point",
        action="append",
        metavar="X,Y",
        help="a region as well: the object that SAM2 finds there, in pixels",
    )
    it.add_argument(
        "--box",
        action="append",
        metavar="X0,Y0,X1,Y1",
        help="and in a box; both count on from the masks' regions",
    )
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    it.add_argument(
        "--dtype",
        help=(
            "of the weights: float32, bfloat16, float16 (default: as stored, but not emulated: docs/video.md)"
        ),
    )
    it.add_argument(
        "--quantize",
        choices=["int8", "fp8"],
        help="the language model in 8 bits (torchao, an extra; fp8: a GPU from Ada on)",
    )


def run(arguments: argparse.Namespace) -> int:
    """A picture, a video (file or folder of frames) and a text: prints the answer, writes it with masks (RLE,
    PNG) and an overlay."""
    source = existing(arguments.source, "a picture, a video file or a folder of frames")
    from ans_core.inference.answer import write_answer

    summary = write_answer(
        source,
        arguments.text,
        checkpoint=Path(arguments.model or newest_model()),
        out=Path(arguments.out or root() / ".ans/predictions" / source.stem),
        max_tokens=arguments.max_tokens,
        video_mode=arguments.video_mode,
        fps=arguments.fps,
        past=[(question, answer) for question, answer in arguments.past or ()],
        masks=[Path(path) for path in arguments.mask or ()],
        points=arguments.point or (),
        boxes=arguments.box or (),
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
    )
    print(summary)
    return 0
