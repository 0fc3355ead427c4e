"""`ans eval submit`: predictions -> the file that a benchmark's server takes. `ans eval export`: a
benchmark's questions -> a plain file, for a model that is run elsewhere."""

from __future__ import annotations

import argparse
from functools import partial

from ans_core.benchmarks import submission
from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.export import QUESTIONS, write_questions
from ans_core.benchmarks.registry import runnable
from ans_core.config.names import benchmark_named
from ans_core.evaluation.predictions import limited

VIDEO = ("mevis", "ref_youtube_vos", "revos", "ref_davis17")


def submit(arguments: argparse.Namespace) -> None:
    if len(arguments.names) != 1 or arguments.predictions is None or arguments.out is None:
        raise ValueError(
            "ans eval submit BENCHMARK --predictions predictions.jsonl --out FILE; one of them is missing"
        )
    name = benchmark_named(arguments.names[0])
    if arguments.out.is_dir() and any(arguments.out.iterdir()):
        raise ValueError(f"{arguments.out} holds files; give a new file or folder")
    records = files.stream(arguments.predictions)
    if next(files.stream(arguments.predictions), None) is None:
        raise ValueError(f"{arguments.predictions}: no predictions to submit")
    if name in VIDEO:
        count = submission.video_zip(arguments.out, records)
    elif name == "vos":
        count = submission.write_vos(arguments.out, records)
    elif name == "gcg":
        count = submission.gcg_folder(arguments.out, records)
    else:
        raise ValueError(f"{name} has no server; there are files for {', '.join((*VIDEO, 'vos', 'gcg'))}")
    print(f"wrote {arguments.out}: {count} predictions")


def export(arguments: argparse.Namespace) -> None:
    if len(arguments.names) != 1 or arguments.data is None or arguments.out is None:
        raise ValueError("ans eval export BENCHMARK --data DIR --out FOLDER; one of them is missing")
    _, runner = runnable(arguments.names[0])
    questions = partial(runner.questions, arguments.data, arguments.split or runner.splits[0])
    items = limited(questions, arguments.limit or 0, runner.group)
    print(f"wrote {arguments.out / QUESTIONS}: {write_questions(items(), arguments.out)} questions")
