"""Predictions -> figures with intervals, by the benchmark's own scorer; and `ans eval score`, which scores
any model's predictions file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ans_core.benchmarks import submission
from ans_core.benchmarks.public import published
from ans_core.benchmarks.public.asked import UnscoredError
from ans_core.benchmarks.public.files import Lines, refuse_same
from ans_core.benchmarks.public.scored import Inputs, Option, Scored, Scorer, scores_of
from ans_core.benchmarks.registry import CONVENTIONS, scorer_of
from ans_core.config.names import SCORED, benchmark_named
from ans_core.evaluation.predictions import name_of
from ans_core.places import root
from ans_core.report import evaluation
from ans_core.written import is_record, write_atomically

if TYPE_CHECKING:
    from ans_core.evaluation.session import Session


@dataclass(frozen=True, kw_only=True)
class Result:
    """`<benchmark>/<split>`, its figures, and each sample's value of the main one; or why there are none."""

    title: str
    metrics: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reason: str = ""
    skipped: bool = False
    """The benchmark's files are missing."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield a record a sample, as the pipeline's own benchmarks write them, from which two models are
        compared."""
        for sample, score in self.scores.items():
            about = {
                "benchmark": self.title,
                "dataset": self.title,
                "sample_id": sample,
                "image_id": "",
                "n_targets": 1,
                "asked": "",
            }
            yield about | {"score": round(score, 4)}


def score_run(
    session: Session, predictions: Path, *, judge: bool, page: bool, log: Callable[[str], None]
) -> Result:
    """Score a run's predictions; write the figures and, with `page`, the pictures."""
    scorer, runner, file = session.scorer, session.runner, session.out / "metrics.json"
    records = Lines(predictions, name_of)
    if page and runner.follows:
        submission.write_vos(session.out / "Annotations", records.values())
    try:
        inputs = session.inputs(predictions)
        scored = scorer.score(judged(session.name, scorer, inputs, file, ask=judge, log=log))
    except UnscoredError as error:
        result = without_figures(session, log, unscored=str(error))
        log(f"predictions: {predictions}")
        return result
    scored.notes.extend(runner.notes)
    if session.note is not None:
        scored.notes.append(session.note(records.values()))
    if session.limit:
        scored.notes.append(f"only {len(records)} questions were asked: not the benchmark's figure")
    intervals, samples = scored.intervals(), list(scorer.table(scored))
    write(file, session.head, scored, intervals, samples)
    rows = published.comparison(session.name, session.split, scored.metrics, samples=len(scored.samples))
    log("\n".join([session.title, *table(scored, intervals), *published.lines(rows)]))
    if page:
        shown = evaluation.write(
            session.out,
            session.head,
            scored,
            intervals,
            rows,
            items=session.items(),
            predictions=records,
            table=samples,
        )
        log(f"predictions, figures and pictures: {shown}")
    return Result(
        title=session.title, metrics=dict(scored.metrics), scores=scores_of(samples), notes=scored.notes
    )


def without_figures(session: Session, log: Callable[[str], None], **reason: str) -> Result:
    """Write why there are none: the files are missing (`skipped`), or nothing here can score the answers
    (`unscored`)."""
    ((word, text),) = reason.items()
    session.out.mkdir(parents=True, exist_ok=True)
    record = {**session.head, word: text, "metrics": {}}
    (session.out / "metrics.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    log(f"{session.title}: {word}: {text}")
    return Result(title=session.title, reason=f"{word}: {text}", skipped=word == "skipped")


def write(
    path: Path,
    head: dict[str, Any],
    scored: Scored,
    intervals: dict[str, tuple[float, float]],
    samples: list[dict[str, Any]],
) -> None:
    """Write `head` with the figures, and beside it a line a sample (.samples.jsonl): its name, record, and
    terms of each metric."""
    record = head | {
        "metrics": scored.metrics,
        "published_form": scored.published,
        "intervals": intervals,
        "scored_together": scored.scored_together,
        "missing": scored.missing,
        "notes": scored.notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    if samples:
        write_atomically(
            path.with_suffix(".samples.jsonl"), "".join(json.dumps(sample) + "\n" for sample in samples)
        )


def score(arguments: argparse.Namespace) -> int:
    if len(arguments.names) != 1:
        raise ValueError(
            f"ans eval score takes one benchmark, not {' '.join(arguments.names) or 'none'}; there are "
            f"{', '.join(SCORED)}"
        )
    called = arguments.names[0].lower().replace("-", "_")
    name, scorer = benchmark_named(called), scorer_of(called)
    if arguments.predictions is None:
        raise ValueError(f"ans eval score {name}: --predictions is missing")
    inputs = Inputs(
        predictions=arguments.predictions,
        data=arguments.data,
        replay=arguments.replay,
        convention=arguments.convention or CONVENTIONS.get(called),
        text_encoder=arguments.text_encoder,
        split=arguments.split or "",
        predicted_only=bool(arguments.predicted_only),
    )
    check(name, scorer, inputs)
    if arguments.out:
        check_out(arguments.out, inputs)
    scored = scorer.score(judged(name, scorer, inputs, arguments.out, ask=True, log=print))
    if inputs.data is None and not inputs.predicted_only:
        scored.notes.extend(published.part(name, scored.metrics, lines=len(scored.samples)))
    intervals = scored.intervals()
    if arguments.out:
        write(arguments.out, {"benchmark": called}, scored, intervals, list(scorer.table(scored)))
    unread = (
        ["note: --data is not read: the predictions hold the truth"]
        if inputs.data and not scorer.data
        else []
    )
    rows = published.comparison(called, "", scored.metrics, samples=len(scored.samples))
    print("\n".join([*table(scored, intervals), *unread, *published.lines(rows)]))
    return 0


def judged(
    name: str, scorer: Scorer, inputs: Inputs, out: Path | None, *, ask: bool, log: Callable[[str], None]
) -> Inputs:
    """Ask the judge that params.yaml names, if these predictions need one; its replies are kept beside `out`.

    Raises UnscoredError without a judge, where it does not answer, and where it is needed and not to be
    asked.
    """
    if scorer.judging is None or not scorer.judging.needed(inputs):
        return inputs
    if not ask:
        raise UnscoredError(
            f"a judge must read the answers: `ans eval score {name} --predictions {inputs.predictions}` asks "
            "it"
        )
    from ans_core.config import load
    from ans_core.judge.choose import benchmarks_judge
    from ans_core.judge.endpoint import NoReplyError

    settings = root() / "params.yaml"
    judge = benchmarks_judge(load(settings), root=root()) if settings.is_file() else None
    if judge is None:
        raise UnscoredError(
            f"{name} is scored by a judge: name one in params.yaml (judge.model, judge.base_url), or give "
            "recorded replies"
            f" ({scorer.judging.replay}); the answers are in {inputs.predictions}"
        )
    replies = (out or root() / ".ans/eval" / name).with_suffix(f".judge{scorer.judging.suffix}")
    replies.parent.mkdir(parents=True, exist_ok=True)
    try:
        with closing(judge):
            inputs = scorer.judging.ask(inputs, judge, replies)
    except NoReplyError as error:
        raise UnscoredError(f"{name}: the judge {error}") from error
    log(f"judge's replies, for --replay: {replies}")
    return inputs


def check(name: str, scorer: Scorer, inputs: Inputs) -> None:
    if scorer.needs_data and inputs.data is None:
        raise ValueError(f"{name} needs --data: {scorer.data}")
    for option in get_args(Option):
        if getattr(inputs, option) and option not in scorer.options:
            raise ValueError(f"{name} takes no --{option.replace('_', '-')}")
    refuse_same(inputs.predictions, inputs.data)


def check_out(out: Path, inputs: Inputs) -> None:
    """Raise ValueError where the figures, or the table of samples beside them, would replace what is scored or
    a file that is no earlier score."""
    written = (out, out.with_suffix(".samples.jsonl"))
    for path in (file.resolve() for file in written):
        for option, read in (("predictions", inputs.predictions), ("replay", inputs.replay)):
            if read is not None and path == read.resolve():
                raise ValueError(f"--out {out} would replace --{option} {read}; give another file")
    earlier = is_record(out, {"benchmark", "metrics"})
    if foreign := [path for path in written if path.exists() and not earlier]:
        raise ValueError(f"{foreign[0]} exists and is of no earlier score; give another --out")


def table(scored: Scored, intervals: dict[str, tuple[float, float]]) -> list[str]:
    rows = [f"{'metric':<36} {'value':>12}  {'published form':<16} 95 % interval"]
    for key, value in scored.metrics.items():
        figure = f"{value:d}" if isinstance(value, int) else f"{value:.6f}"
        spread = "{:.4f} .. {:.4f}".format(*intervals[key]) if key in intervals else ""
        rows.append(f"{key:<36} {figure:>12}  {scored.published.get(key, ''):<16} {spread}".rstrip())
    if scored.missing:
        rows.append(f"{scored.missing} predictions are missing; they count 0")
    return rows + [f"note: {note}" for note in scored.notes]
