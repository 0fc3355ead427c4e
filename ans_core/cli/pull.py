"""`ans pull`: a model from the hub."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument("repo", metavar="REPO", help="OWNER/NAME")
    it.add_argument("target", metavar="DST", help="folder; the same one goes on after an interruption")
    it.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """A model repository of the Hugging Face hub to a folder: goes on where it was cut off, compares
    checksums, checks every tensor."""
    from ans_core.hub.push import pull as fetch_model

    return fetch_model(arguments.repo, Path(arguments.target), yes=arguments.yes)
