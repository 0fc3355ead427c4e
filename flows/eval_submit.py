"""`ans eval submit BENCHMARK --predictions FILE --out FILE`: the file that a benchmark's server takes."""

from __future__ import annotations

import argparse

VIDEO = ("mevis", "ref_youtube_vos", "revos", "ref_davis17")


def submit(arguments: argparse.Namespace) -> int:
    from ans_core.benchmarks import submission
    from ans_core.benchmarks.public import files
    from flows.eval_score import scorer_of

    if len(arguments.names) != 1 or arguments.predictions is None or arguments.out is None:
        raise ValueError("ans eval submit BENCHMARK --predictions predictions.jsonl --out FILE; one of them is missing")
    name, _ = scorer_of(arguments.names[0])
    lines = files.lines(arguments.predictions)
    if name in VIDEO:
        count = submission.video_zip_of_lines(arguments.out, lines, where=str(arguments.predictions))
    elif name == "gcg":
        count = submission.gcg_folder_of_lines(arguments.out, lines, where=str(arguments.predictions))
    else:
        raise ValueError(f"{name} has no server; there are files for {', '.join((*VIDEO, 'gcg'))}")
    print(f"wrote {arguments.out}: {count} predictions")
    return 0
