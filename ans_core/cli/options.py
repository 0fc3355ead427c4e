"""Options and defaults that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ans_core.places import root


def positive(text: str) -> int:
    """Read a count; argparse shows the name of this function where `text` is none."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def existing(path: str, what: str) -> Path:
    """Return the path; call it before the model's imports, which take seconds. Raises ValueError with `what` to
    give where nothing is there."""
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist; give {what}")
    return Path(path)


READERS = ("rapidocr", "template")
"""Of READ_TEXT, as in ans_core/config/names.py, which loads pydantic."""


def add_agents_reader(add: Callable[..., argparse.Action]) -> None:
    """`add`: the `add_argument` of a parser or of a group of options."""
    help_text = "what the agent's read_text reads with (default: what it was trained with, else rapidocr)"
    add("--reader", choices=READERS, help=help_text)


def add_fetch_options(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "--into",
        metavar="FOLDER",
        help="of fetch: where each name gets a folder (default: data/ and weights/ as profiles expect)",
    )
    it.add_argument("--yes", action="store_true", help="of fetch: do not ask")


def newest_model() -> Path:
    """Return the model of params.yaml's profile. Raises ValueError where there is no params.yaml."""
    from ans_core.config import load

    if not (root() / "params.yaml").exists():
        raise ValueError("--model is missing, and there is no params.yaml here whose run made one")
    return root() / "runs" / load(root() / "params.yaml").profile / "model"
