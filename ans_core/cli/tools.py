"""`ans tools`: the agent's operations by hand."""

from __future__ import annotations

import argparse

from ans_core.cli.options import READERS, newest_model
from ans_core.places import root


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument("name", nargs="?", metavar="OPERATION", help="without one, all are listed")
    it.add_argument(
        "source",
        nargs="?",
        metavar="IMAGE|VIDEO",
        help="a picture, a video file, or a folder with the frames of one",
    )
    it.add_argument(
        "settings", nargs="*", metavar="key=value", help="as in bbox_2d=[250,500,500,750] or 'masks=[mask_1]'"
    )
    it.add_argument(
        "--mask",
        action="append",
        metavar="PNG",
        help="becomes mask_1, mask_2, ...: of the picture's size, 0 = outside",
    )
    it.add_argument(
        "--model", help="checkpoint folder, for operations that need one (default: runs/<profile>/model)"
    )
    it.add_argument("--out", metavar="FOLDER", help="where to write (default: .ans/tools/<operation>)")
    it.add_argument(
        "--reader", choices=READERS, default="rapidocr", help="what read_text reads with (default: rapidocr)"
    )


def run(arguments: argparse.Namespace) -> int:
    """The agent's visual operations: lists them, or runs one on a picture or a clip and writes what it
    shows."""
    from ans_core.agent.tools import list_operations, run_operation

    print(
        run_operation(arguments, out=root() / ".ans/tools", newest_model=newest_model)
        if arguments.name
        else list_operations()
    )
    return 0
