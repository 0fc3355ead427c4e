"""The `ans` command: a command line in, one call into the model, or into the pipeline where its checkout is
there, out."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import importlib
import io
import os
import select
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

from ans_core.checkpoints import hub_id
from ans_core.cli import agent, ask, convert, data, demo, evaluate, predict, pull, push, tools, track, weights
from ans_core.places import is_checkout

USER_ERROR = 2
CLOSED_PIPE = 141
"""Exit status of a program that SIGPIPE ends, as the shell shows it."""
COMMANDS = {
    "predict": predict,
    "track": track,
    "ask": ask,
    "tools": tools,
    "agent": agent,
    "demo": demo,
    "eval": evaluate,
    "data": data,
    "convert": convert,
    "weights": weights,
    "push": push,
    "pull": pull,
}
"""What a model's user types; the pipeline adds its own (flows/cli.py)."""

Command = Callable[[str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]
"""Makes the parser of a command by its name and what it runs, whose docstring is the help."""


def pipeline() -> ModuleType | None:
    """Return the pipeline's commands, flows/cli.py; None where this package is installed without its
    checkout."""
    return importlib.import_module("flows.cli") if is_checkout(Path(__file__).resolve().parents[2]) else None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="ans",
        description=(
            "Trains and evaluates pixel-grounded multimodal models: annotations in, a checkpoint and a "
            "report out."
        ),
    )
    top.add_argument("--version", action="version", version=f"ans {metadata.version('ans')}")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = subparsers.add_parser(
            name, help=(function.__doc__ or "").strip(), description=function.__doc__
        )
        made.set_defaults(function=function)
        return made

    made = {name: command(name, module.run) for name, module in COMMANDS.items()}
    for name, module in COMMANDS.items():
        module.add_arguments(made[name])
    if (flows := pipeline()) is not None:
        flows.add_commands(command)
        made["eval"].set_defaults(
            record=flows.record, of_checkpoint=flows.of_checkpoint, job_words=flows.job_words
        )
    return top


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """argparse leaves words over that follow an option: of `ans profile tiny --force a=b` and `ans tools`
    they are settings, anything else is an error."""
    top = parser()
    arguments, rest = top.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(arguments, "settings")]
    if unknown:
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.settings += rest
    return arguments


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that a terminal's encoding lacks ends no command
    try:
        try:
            run()
        finally:
            sys.stdout.flush()  # here, where an error is caught, and not as the interpreter ends
    except OSError as error:  # of standard output: run() tells any other
        closed = output_is_closed()
        if os.environ.get("ANS_TRACEBACK") and not closed:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what could not be written
        if not closed:
            print(message(error), file=sys.stderr)
        sys.exit(CLOSED_PIPE if closed else USER_ERROR)


def message(error: Exception) -> str:
    remedies = {  # of what Python says without one
        errno.ENOSPC: "; free space there, and give the same command again",
        errno.EACCES: "; if that is in another user's checkout, work in a clone of your own",
    }
    return f"ans: {error}" + (remedies.get(error.errno or 0, "") if isinstance(error, OSError) else "")


def output_is_closed() -> bool:
    """Whether the program that reads standard output, as `head`, has ended. Any other broken pipe is an
    error."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def run() -> None:
    """Run the command of the command line and exit with its status."""
    arguments = parse()
    # else the interpreter walks through all that was imported as it ends: 0.9 s with MLflow and Prefect
    atexit.register(gc.freeze)
    if (flows := pipeline()) is not None:
        os.environ.update(flows.environment())
    try:
        if model := getattr(arguments, "model", None):
            hub_id.check(model.removeprefix("box:"))  # before what takes seconds to import
        sys.exit(arguments.function(arguments))
    except (
        ValueError,
        OSError,
    ) as error:  # errors in the input; ANS_TRACEBACK=1 shows where they were raised
        if os.environ.get("ANS_TRACEBACK") or (isinstance(error, BrokenPipeError) and output_is_closed()):
            raise
        print(message(error), file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes", file=sys.stderr)
        sys.exit(130)
