"""`ans weights`: published bases and releases, fetched."""

from __future__ import annotations

import argparse

from ans_core.cli.options import add_fetch_options
from ans_core.places import root


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument("action", choices=["fetch"])
    it.add_argument("names", nargs="*", metavar="NAME")
    add_fetch_options(it)


def run(arguments: argparse.Namespace) -> int:
    """Downloads published bases and releases by name; without a name, lists them."""
    from ans_core.hub.catalogue import WEIGHTS
    from ans_core.hub.fetch import fetch

    return fetch(arguments.names, WEIGHTS, root=root(), into=arguments.into, yes=arguments.yes)
