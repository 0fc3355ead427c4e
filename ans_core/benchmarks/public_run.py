"""A public benchmark on one model: its questions and a model in; predictions.jsonl and figures out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ans_core.benchmarks import running
from ans_core.benchmarks.public import CONVENTIONS, SCORERS, Answerer, Given, Runner, Scored, Scorer, UnscoredError
from ans_core.benchmarks.public.scored import scores_of
from ans_core.config.names import benchmark_named


def scorer_of(name: str) -> tuple[str, Scorer]:
    """Return the scorer that people mean, and its own name. Raises ValueError naming those there are."""
    known = benchmark_named(name)
    return known, SCORERS[known]


def runner_of(name: str) -> Runner:
    """Return how a model is run on it. Raises ValueError for a benchmark of files alone."""
    known, scorer = scorer_of(name)
    if scorer.runner is None:
        runnable = ", ".join(sorted(n for n, s in SCORERS.items() if s.runner))
        raise ValueError(f"{known} scores files alone (`ans eval score {known}`); a model can be run on {runnable}")
    return scorer.runner


def split_of(runner: Runner, data: Path) -> str:
    """Return the split of a folder for which none was asked."""
    if runner.split_of is not None and data.is_dir():
        return runner.split_of(data)
    return data.name if data.name in runner.splits else runner.splits[0]


def missing(runner: Runner, data: Path, split: str) -> str | None:
    """Return what of the benchmark's data is not there or can't be read, before a model is asked."""
    if not data.exists():
        return f"{data} is not there; put the benchmark's files there, or give --data"
    try:
        next(iter(runner.questions(data, split)), None)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def given_of(
    name: str, predictions: Path, data: Path, split: str, *, limit: int, convention: str | None = None, text_encoder: str | None = None
) -> Given:
    """Return what the scorer is given of a run. Raises UnscoredError if the truth is elsewhere."""
    _, scorer = scorer_of(name)
    return Given(
        predictions=predictions,
        data=runner_of(name).truth(data, split),
        predicted_only=bool(limit),
        split=split if "split" in scorer.options else "",
        convention=convention or CONVENTIONS.get(name),
        text_encoder=text_encoder if "text_encoder" in scorer.options else None,
    )


@dataclass(frozen=True, kw_only=True)
class Result:
    """`<benchmark>/<split>`, its figures, and each sample's value of the main one; or why there are none."""

    title: str
    metrics: dict[str, float]
    scores: dict[str, float]
    reason: str = ""


def run(name: str, data: Path, *, split: str, limit: int, ask: Answerer, batch: int, scratch: Path, out: Path) -> Result:
    """Run and score a benchmark, without a judge. Predictions grow in `scratch`, from where a killed run goes on; `out` gets the whole file
    and the figures."""
    runner, (_, scorer) = runner_of(name), scorer_of(name)
    split = split or split_of(runner, data)
    title = "/".join(filter(None, (name, split)))
    if reason := missing(runner, data, split):
        return Result(title=title, metrics={}, scores={}, reason=f"skipped: {reason}")
    items = running.limited(lambda: runner.questions(data, split), limit)
    folder = title.replace("/", "-")
    (scratch / folder).mkdir(parents=True, exist_ok=True)
    (out / folder).mkdir(parents=True, exist_ok=True)
    made = running.predict_all(items, ask, runner, out=scratch / folder, batch=batch, desc=title)
    predictions = Path(shutil.copy(made, out / folder))
    try:
        given = given_of(name, predictions, data, split, limit=limit)
        if scorer.judging is not None and scorer.judging.needed(given):
            raise UnscoredError(f"a judge must read the answers: `ans eval score {name} --predictions {predictions}` asks it")
    except UnscoredError as error:
        return Result(title=title, metrics={}, scores={}, reason=f"unscored: {error}")
    scored = scorer.score(given)
    write(out / folder / "metrics.json", {"benchmark": name, "split": split, "limit": limit}, scorer, scored, scored.intervals())
    metrics = {f"{title}/{key}": float(value) for key, value in scored.metrics.items()}
    return Result(title=title, metrics=metrics, scores=scores_of(list(scorer.table(scored))))


def score_lines(result: Result) -> Iterator[dict[str, Any]]:
    """Yield a record a sample, as the pipeline's own benchmarks write them, from which two models are compared."""
    for sample, score in result.scores.items():
        about = {"benchmark": result.title, "dataset": result.title, "sample_id": sample, "image_id": "", "n_targets": 1, "asked": ""}
        yield about | {"score": round(score, 4)}


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
