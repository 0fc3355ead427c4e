"""`ans demo`: the page in the browser."""

from __future__ import annotations

import argparse

from ans_core.cli.options import newest_model


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="checkpoint folder or hub id (default: runs/<profile>/model)",
    )
    it.add_argument(
        "--against",
        action="append",
        metavar="MODEL",
        help="a further one to compare with (a run's own are there already)",
    )
    it.add_argument("--port", type=int, default=7860, help="(default: 7860)")
    it.add_argument(
        "--host", default="127.0.0.1", help="another address opens the page to the network and needs --auth"
    )
    it.add_argument(
        "--auth", metavar="USER", help="asks for USER's password, or takes it from ANS_DEMO_PASSWORD"
    )
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")


def run(arguments: argparse.Namespace) -> int:
    """A page in the browser: ask a checkpoint about pictures and clips. On this machine alone, unless --host
    says otherwise."""
    from ans_core.demo.serve import serve

    model = arguments.model or str(newest_model())
    return serve(
        model,
        arguments.against or [],
        host=arguments.host,
        port=arguments.port,
        auth=arguments.auth,
        device=arguments.device,
    )
