"""`ans eval score`: score any model's predictions file against a benchmark's truth, with the benchmark's own metrics."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ans_core.benchmarks.public import Given, Scored, Scorer

OPTIONS = ("replay", "convention", "text_encoder", "predicted_only")


def score(arguments: argparse.Namespace) -> int:
    from ans_core.benchmarks.public import Given
    from ans_core.benchmarks.public.published import beside, lines

    if len(arguments.names) != 1:
        raise ValueError(f"ans eval score takes one benchmark, not {' '.join(arguments.names) or 'none'}; there are {known_names()}")
    name, scorer = scorer_of(*arguments.names)
    given = Given(
        predictions=_needed(arguments.predictions, f"ans eval score {name}: --predictions is missing"),
        data=arguments.data,
        replay=arguments.replay,
        convention=arguments.convention,
        text_encoder=arguments.text_encoder,
        predicted_only=bool(arguments.predicted_only),
    )
    check(name, scorer, given)
    scored = scorer.score(given)
    intervals = scored.intervals()
    if arguments.out:
        write(arguments.out, {"benchmark": name}, scorer, scored, intervals)
    unread = ["note: --data is not read: the predictions hold the truth"] if given.data and not scorer.data else []
    rows = beside(arguments.names[0].lower(), "", scored.metrics, whole=len(scored.samples))
    print("\n".join([*table(scored, intervals), *unread, *lines(rows)]))
    return 0


def known_names() -> str:
    from ans_core.benchmarks.public import SCORERS

    return ", ".join(sorted(SCORERS))


def scorer_of(name: str) -> tuple[str, Scorer]:
    from ans_core.benchmarks.public import OTHER_NAMES, SCORERS

    known = name.lower().replace("-", "_")
    known = OTHER_NAMES.get(known, known)
    if known not in SCORERS:
        raise ValueError(f"no benchmark {name!r} to score; there are {known_names()}")
    return known, SCORERS[known]


def check(name: str, scorer: Scorer, given: Given) -> None:
    from ans_core.benchmarks.public.files import refuse_same

    if scorer.needs_data and given.data is None:
        raise ValueError(f"{name} needs --data: {scorer.data}")
    for option in OPTIONS:
        if getattr(given, option) and option not in scorer.options:
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


def write(path: Path, known: dict[str, Any], scorer: Scorer, scored: Scored, intervals: dict[str, tuple[float, float]]) -> None:
    """Write `known` with the figures, and beside it a line a sample (.samples.jsonl): its name, record, and terms of each metric."""
    record = known | {
        "metrics": scored.metrics,
        "published_form": scored.published,
        "intervals": intervals,
        "missing": scored.missing,
        "notes": scored.notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if scored.samples:
        lines = (json.dumps(sample) + "\n" for sample in scorer.table(scored))
        path.with_suffix(".samples.jsonl").write_text("".join(lines), encoding="utf-8")
