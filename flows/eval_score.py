"""`ans eval score`: score any model's predictions file against a benchmark's truth, with the benchmark's own metrics."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ans_core.benchmarks.public import Given, Scored, Scorer

OPTIONS = ("replay", "convention", "text_encoder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    only = "with `score`: "
    parser.add_argument("benchmark", nargs="?", help=only + "the benchmark (an unknown one is answered with all there are)")
    parser.add_argument("--predictions", type=Path, metavar="FILE|DIR", help=only + "what is scored")
    parser.add_argument("--data", type=Path, metavar="DIR", help=only + "the benchmark's own files")
    parser.add_argument(
        "--out", type=Path, metavar="metrics.json", help=only + "also written here, each sample's beside it (.samples.jsonl)"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help=only + "a judge's recorded replies, in place of a judge")
    parser.add_argument("--convention", choices=["davis", "mose"], help=only + "of vos (default: davis)")
    parser.add_argument("--text-encoder", metavar="PATH", help=only + "folder or hub id of the encoder that compares gcg's phrases")


def refuse_options(arguments: argparse.Namespace) -> None:
    """Refuse the options of `ans eval CHECKPOINT`."""
    given = [name for name in ("benchmark", "predictions", "data", "out", *OPTIONS) if getattr(arguments, name) is not None]
    if given:
        raise ValueError(f"ans eval CHECKPOINT takes no {', '.join(given)}; those go with `ans eval score BENCHMARK`")


def score(arguments: argparse.Namespace) -> int:
    from ans_core.benchmarks.public import Given
    from ans_core.metrics.bootstrap import interval

    name, scorer = scorer_of(arguments.benchmark)
    given = Given(
        predictions=_needed(arguments.predictions, f"ans eval score {name}: --predictions is missing"),
        data=arguments.data,
        **{option: getattr(arguments, option) for option in OPTIONS},
    )
    check(name, scorer, given)
    scored = scorer.score(given)
    intervals = {key: interval(ratio) for key, ratio in scored.ratios.items() if len(ratio.numerators) > 1}
    if arguments.out:
        write(arguments.out, name, scored, intervals)
    unread = ["note: --data is not read: the predictions hold the truth"] if given.data and not scorer.data else []
    print("\n".join([*table(scored, intervals), *unread, *others(name)]))
    return 0


def others(name: str) -> list[str]:
    """Return what other systems reached on the whole benchmark."""
    from ans_core.benchmarks.public.published import published

    rows = [
        f"{f.metric:<12} {f.value:>6.1f}  {f.model:<20} {'; '.join(filter(None, (f.split, f.source, f.note)))}" for f in published(name)
    ]
    return ["published figures, of the whole benchmark, in percent:", *rows] if rows else []


def scorer_of(name: str | None) -> tuple[str, Scorer]:
    from ans_core.benchmarks.public import OTHER_NAMES, SCORERS

    known = (name or "").lower().replace("-", "_")
    known = OTHER_NAMES.get(known, known)
    if known not in SCORERS:
        raise ValueError(f"no benchmark {name!r} to score; there are {', '.join(sorted(SCORERS))}")
    return known, SCORERS[known]


def check(name: str, scorer: Scorer, given: Given) -> None:
    from ans_core.benchmarks.public.files import refuse_same

    if scorer.needs_data and given.data is None:
        raise ValueError(f"{name} needs --data: {scorer.data}")
    for option in OPTIONS:
        if getattr(given, option) is not None and option not in scorer.options:
            raise ValueError(f"{name} takes no --{option.replace('_', '-')}")
    refuse_same(given.predictions, given.data)


def _needed(path: Path | None, message: str) -> Path:
    if path is None:
        raise ValueError(message)
    return path


def table(scored: Scored, intervals: dict[str, tuple[float, float]]) -> list[str]:
    rows = [f"{'metric':<36} {'value':>12}  {'published form':<16} 95 % interval"]
    for key, value in scored.metrics.items():
        figure = f"{value:d}" if isinstance(value, int) else f"{value:.6f}"
        spread = "{:.4f} .. {:.4f}".format(*intervals[key]) if key in intervals else ""
        rows.append(f"{key:<36} {figure:>12}  {scored.published.get(key, ''):<16} {spread}".rstrip())
    if scored.missing:
        rows.append(f"{scored.missing} predictions are missing; they count 0")
    return rows + [f"note: {note}" for note in scored.notes]


def write(path: Path, name: str, scored: Scored, intervals: dict[str, tuple[float, float]]) -> None:
    record: dict[str, Any] = {
        "benchmark": name,
        "metrics": scored.metrics,
        "published_form": scored.published,
        "intervals": intervals,
        "missing": scored.missing,
        "notes": scored.notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if scored.samples:
        lines = (json.dumps(sample) + "\n" for sample in scored.samples)
        path.with_suffix(".samples.jsonl").write_text("".join(lines), encoding="utf-8")
