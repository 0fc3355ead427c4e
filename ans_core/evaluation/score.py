"""`ans eval score`: score any model's predictions file against a benchmark's truth, with the benchmark's own metrics."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ans_core.places import root

if TYPE_CHECKING:
    from ans_core.benchmarks.public import Given, Scored, Scorer

OPTIONS = ("replay", "convention", "text_encoder", "predicted_only", "split")


def score(arguments: argparse.Namespace) -> int:
    from ans_core.benchmarks.public import CONVENTIONS, Given
    from ans_core.benchmarks.public.published import beside, lines, part
    from ans_core.benchmarks.public_run import scorer_of, write
    from ans_core.config.names import SCORED

    if len(arguments.names) != 1:
        raise ValueError(f"ans eval score takes one benchmark, not {' '.join(arguments.names) or 'none'}; there are {', '.join(SCORED)}")
    name, scorer = scorer_of(*arguments.names)
    given = Given(
        predictions=_needed(arguments.predictions, f"ans eval score {name}: --predictions is missing"),
        data=arguments.data,
        replay=arguments.replay,
        convention=arguments.convention or CONVENTIONS.get(arguments.names[0].lower()),
        text_encoder=arguments.text_encoder,
        split=arguments.split or "",
        predicted_only=bool(arguments.predicted_only),
    )
    check(name, scorer, given)
    scored = scorer.score(judged(name, scorer, given, arguments.out))
    if given.data is None and not given.predicted_only:
        scored.notes.extend(part(name, scored.metrics, lines=len(scored.samples)))
    intervals = scored.intervals()
    if arguments.out:
        write(arguments.out, {"benchmark": name}, scorer, scored, intervals)
    unread = ["note: --data is not read: the predictions hold the truth"] if given.data and not scorer.data else []
    rows = beside(arguments.names[0].lower().replace("-", "_"), "", scored.metrics, whole=len(scored.samples))
    print("\n".join([*table(scored, intervals), *unread, *lines(rows)]))
    return 0


def judged(name: str, scorer: Scorer, given: Given, out: Path | None) -> Given:
    """Ask the judge that params.yaml names, if these predictions need one; its replies are kept beside `out`.

    Raises UnscoredError without a judge, and where it does not answer.
    """
    from ans_core.benchmarks.public import UnscoredError

    if scorer.judging is None or not scorer.judging.needed(given):
        return given
    from ans_core.config import load
    from ans_core.judge.choose import replies_of
    from ans_core.judge.replies import NoReplyError

    settings = root() / "params.yaml"
    judge = replies_of(load(settings), root=root()) if settings.is_file() else None
    if judge is None:
        raise UnscoredError(
            f"{name} is scored by a judge: name one in params.yaml (judge.model, judge.base_url), or give recorded replies"
            f" ({scorer.judging.replay}); the answers are in {given.predictions}"
        )
    kept = (out or root() / ".ans/eval" / name).with_suffix(f".judge{scorer.judging.suffix}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    try:
        found = scorer.judging.ask(given, judge, kept)
    except NoReplyError as error:
        raise UnscoredError(f"{name}: the judge {error}") from error
    print(f"judge's replies, for --replay: {kept}")
    return found


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
