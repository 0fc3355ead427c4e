"""`ans ask`: the agent on pictures or a clip."""

from __future__ import annotations

import argparse

from ans_core.cli.options import add_agents_reader
from ans_core.places import root


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "source",
        metavar="IMAGE|VIDEO",
        nargs="+",
        help="a picture, or several (image_1, image_2, ... in the question), a video file, or a folder with the "
        "frames of one",
    )
    it.add_argument("text", metavar="QUESTION")
    it.add_argument("--model", help="folder of the base (default: agent.base of params.yaml)")
    it.add_argument(
        "--agent",
        metavar="FOLDER",
        help="what agent_sft or rft trained on it (default: of runs/<profile>/agent)",
    )
    it.add_argument(
        "--out", metavar="FOLDER", help="where to write (default: .ans/episodes/<name of the source>)"
    )
    it.add_argument(
        "--segmenter",
        metavar="FOLDER",
        help="a Sa2VA that draws and follows the agent's masks (default: its own base)",
    )
    add_agents_reader(it.add_argument)
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")


def run(arguments: argparse.Namespace) -> int:
    """The agent on pictures or a clip: prints its episode turn by turn (call, what came back, answer), and
    writes what each turn made."""
    from ans_core.agent.ask import ask as run_it

    return run_it(arguments, root())
