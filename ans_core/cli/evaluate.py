"""`ans eval`: which of its forms the words ask for, and the options of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ans_core.cli.options import add_agents_reader, positive

ALLOWED = {
    "CHECKPOINT": frozenset[str](),
    "BENCHMARK": frozenset((
        "model", "agent", "reader", "data", "split", "limit", "out", "batch", "max_tokens", "video_mode",
        "processes", "device", "dtype", "quantize", "text_encoder", "convention",
    )),
    "score": frozenset(("predictions", "data", "split", "out", "replay", "convention", "text_encoder", "predicted_only")),
    "compare": frozenset(("out",)),
    "submit": frozenset(("predictions", "out")),
    "export": frozenset(("data", "split", "limit", "out")),
}  # fmt: skip
"""Options by form."""


USAGE = """ans eval BENCHMARK[,BENCHMARK] --model MODEL [--agent FOLDER] [--data DIR] [--split S] [--limit N] [--out DIR] ...
       ans eval score BENCHMARK --predictions FILE|DIR [--data DIR] [--out metrics.json] ...
       ans eval compare EVALUATION EVALUATION [--out DIR]
       ans eval submit BENCHMARK --predictions FILE --out FILE|DIR
       ans eval export BENCHMARK --data DIR --out FOLDER [--split S] [--limit N]
       ans eval CHECKPOINT
       ans eval --list"""


class List(argparse.Action):
    """Print the benchmarks and end."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        from ans_core.config import names

        for name in names.SCORED:
            others = [other for other, meant in names.OTHER_NAMES.items() if meant == name]
            alone = "scores files alone" if name in names.FILES_ALONE else ""
            print(f"{name:20}{alone:20}{', '.join(others)}".rstrip())
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.add_argument(
        "what",
        metavar="BENCHMARK|score|compare|submit|export|CHECKPOINT",
        help="what to do; `--list` names the benchmarks",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="the benchmark, or the folders of two evaluations"
    )
    parser.add_argument("--list", action=List, help="name the benchmarks, and what else they are called")
    add = parser.add_argument_group("options, by form").add_argument
    add_model_options(add)
    add_scoring_options(add)
    parser.set_defaults(record=None)  # the pipeline's, called with what was evaluated, its metrics and notes
    # the pipeline's: words after Python that run this command as a job, or None
    parser.set_defaults(job_words=None)
    # the pipeline's, which evaluates a checkpoint on the benchmarks of params.yaml
    parser.set_defaults(of_checkpoint=None)


def add_model_options(add: Callable[..., argparse.Action]) -> None:
    add(
        "--model",
        metavar="MODEL",
        help="checkpoint folder or hub id; box:FOLDER: a base's boxes given to SAM2, untrained",
    )
    add(
        "--agent",
        metavar="FOLDER",
        help="what agent_sft or rft trained on MODEL: answers without tools and with them, side by side",
    )
    add_agents_reader(add)
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="the benchmark's own files (default: data/benchmarks/<benchmark>, for a model)",
    )
    add("--split", help="default: the benchmark's first")
    add("--limit", type=positive, metavar="N", help="only N questions, at equal steps through all of them")
    add(
        "--out",
        type=Path,
        help=(
            "folder of a run or comparison (default: under .ans/eval); metrics.json of a score; the file to "
            "submit"
        ),
    )
    add(
        "--batch",
        type=positive,
        metavar="N",
        help="questions a batch (default: 16); part of what decides the last digits",
    )
    add(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="of an answer (default: 512; of an agent, and of its calls: agent.episode.turn_tokens)",
    )
    add(
        "--video-mode",
        choices=["auto", "sa2va", "sa2va-i", "keyframe"],
        help="how masks go through a clip: docs/video.md (default: auto)",
    )
    add(
        "--processes",
        type=positive,
        metavar="N",
        help="processes or GPUs that share the questions (torchrun; default: 1)",
    )
    add("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights (default: auto, as stored, but not emulated: docs/video.md)",
    )
    add(
        "--quantize",
        choices=["int8", "fp8"],
        help="the language model in 8 bits (torchao, an extra; fp8: a GPU from Ada on)",
    )


def add_scoring_options(add: Callable[..., argparse.Action]) -> None:
    add("--predictions", type=Path, metavar="FILE|DIR", help="what is scored or submitted")
    add(
        "--predicted-only",
        action="store_true",
        default=None,
        help="score only what is predicted (a run with --limit)",
    )
    add("--replay", type=Path, metavar="FILE", help="a judge's recorded replies, in place of a judge")
    add(
        "--convention",
        choices=["davis", "davis2017-evaluation", "mose"],
        help="of vos (default: davis; of mose and sav: mose)",
    )
    add("--text-encoder", metavar="PATH", help="folder or hub id of the encoder that compares gcg's phrases")


def form(arguments: argparse.Namespace) -> str:
    """Return the key of ALLOWED. Raises ValueError for an option or a name that goes with another form."""
    chosen = (
        arguments.what
        if arguments.what in ALLOWED
        else "CHECKPOINT"
        if arguments.model is None
        else "BENCHMARK"
    )
    if chosen == "CHECKPOINT" and not Path(arguments.what).exists():
        raise ValueError(
            f"{arguments.what} is no folder of a checkpoint; to run a benchmark give --model, to score "
            "predictions `ans eval score`"
        )
    options = {option for allowed in ALLOWED.values() for option in allowed}
    if wrong := sorted(
        option for option in options - ALLOWED[chosen] if getattr(arguments, option) is not None
    ):
        named = ", ".join(f"--{option.replace('_', '-')}" for option in wrong)
        raise ValueError(f"ans eval {chosen} takes no {named}; `ans eval --help` says what goes with what")
    if arguments.names and chosen in ("CHECKPOINT", "BENCHMARK"):
        raise ValueError(
            f"ans eval {chosen} takes nothing behind {arguments.what}: {' '.join(arguments.names)} (several: "
            "a,b)"
        )
    return chosen


def run(arguments: argparse.Namespace) -> int:
    """Public benchmarks: a model run on one, a predictions file scored, two results compared, a server's file
    written. Or the benchmarks of params.yaml on a checkpoint."""
    chosen = form(arguments)
    from ans_core.config.names import benchmark_named

    named = {"BENCHMARK": arguments.what.split(","), "compare": (), "CHECKPOINT": ()}
    for name in named.get(chosen, arguments.names):
        benchmark_named(name)  # raises for one that there is not, before anything slow is loaded
    match chosen:
        case "CHECKPOINT" if arguments.of_checkpoint is None:
            raise ValueError(
                f"ans eval {arguments.what}: the benchmarks of params.yaml need the checkout of ANS; here, "
                "name one (`ans eval --list`)"
            )
        case "CHECKPOINT":
            status: int = arguments.of_checkpoint(arguments)
            return status
        case "score":
            from ans_core.evaluation.score import score

            return score(arguments)
        case "compare":
            from ans_core.evaluation.compare import compare

            compare(arguments.names, arguments.out)
        case "submit":
            from ans_core.evaluation.submit import submit

            submit(arguments)
        case "export":
            from ans_core.evaluation.submit import export

            export(arguments)
        case _:
            from ans_core.evaluation import session

            if arguments.dtype == "auto":
                arguments.dtype = None
            return session.run(arguments)
    return 0
