"""Compare two rows' metrics and per-sample scores: what changed, by how much, and how certain that is."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ans_core.metrics.bootstrap import Ratio, difference
from ans_core.report.metrics import Summary, parse

SCORED_BY = {
    "referring": "gIoU_all",
    "region_caption": "METEOR",
    "grounded_caption": "mIoU_all_objects",
    "video": "J&F",
    "loop1": "IoU",
    "loop2": "METEOR",
}
"""The metric that is the mean of each benchmark's per-sample scores."""
WITHOUT_SCORES = {
    "referring": ("gIoU", "cIoU", "N_acc"),
    "region_caption": ("exact_match",),
    "loop1": ("IoU",),
    "loop2": ("METEOR",),
}
"""Also in the verdict, as plain differences where there is no score of theirs for each sample (earlier runs
have none of the loops)."""
OF_SOME = {"referring": {"gIoU": (1,), "N_acc": (0,)}}
"""Metrics that are the mean score of samples with so many objects, beside that of all samples."""
RESAMPLES = 2000
Verdict = Literal["better", "worse", "unclear", "no interval"]
VERDICTS: tuple[Verdict, ...] = ("better", "worse", "unclear", "no interval")
Key = tuple[str, str, int]
"""Data set, sample id, and the record's number among those with that id."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    score: float
    question: str
    objects: int | None = None
    """How many are meant; None: not written down."""
    text: str = ""
    """Of a region's caption."""


Answers = dict[str, dict[Key, Answer]]
"""By benchmark."""


@dataclass(frozen=True, kw_only=True)
class Change:
    title: str
    metric: str
    before: float
    after: float
    interval: tuple[float, float] | None = None
    """95 % of the difference; None: no per-sample scores."""
    pairs: int | None = None
    """None, with an interval: of samples that are not the same ones, so it is wider."""

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def verdict(self) -> Verdict:
        if self.interval is None:
            return "no interval"
        low, high = self.interval
        return "better" if low > 0 else "worse" if high < 0 else "unclear"


def read_answers(folder: Path | None) -> Answers:
    """Read a row's predictions.jsonl; empty if there is none."""
    answers: Answers = defaultdict(dict)
    for benchmark, key, record in keyed_lines(folder / "predictions.jsonl") if folder else ():
        text = str(record.get("text", "")) if parse(benchmark).task == "region_caption" else ""
        answers[benchmark][key] = Answer(
            score=float(record["score"]),
            question=str(record["asked"]),
            objects=record.get("n_targets"),
            text=text,
        )
    return dict(answers)


def keyed_lines(path: Path) -> Iterator[tuple[str, Key, dict[str, Any]]]:
    """Yield (benchmark, key, record) of every prediction; nothing if there is no file. Raises ValueError for
    a line without a score."""
    if not path.exists():
        return
    seen: Counter[tuple[str, str, str]] = Counter()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                where = (str(record["benchmark"]), str(record["dataset"]), str(record["sample_id"]))
                score, _ = float(record["score"]), record["asked"]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} line {number}: no prediction with a score ({error!r}); run its evaluate stage "
                    "again"
                ) from error
            if not math.isfinite(score):
                raise ValueError(
                    f"{path} line {number}: score {score} of sample {where[2]!r}; run its evaluate stage "
                    "again"
                )
            yield where[0], (where[1], where[2], seen[where]), record
            seen[where] += 1


def changes(summary: Summary, answers: Mapping[str, Answers], before: str, after: str) -> list[Change]:
    """Return the changes of row `after` against row `before`, in the order of VERDICTS."""
    old, new = summary.get(before, {}), summary.get(after, {})
    tried: list[Change | None] = []
    for benchmark, now in answers.get(after, {}).items():
        then, task = answers.get(before, {}).get(benchmark, {}), parse(benchmark).task
        tried.append(_scored(benchmark, SCORED_BY.get(task, ""), old, new, then, now))
        for metric, objects in OF_SOME.get(task, {}).items():
            some = (
                {key: answer for key, answer in row.items() if answer.objects in objects}
                for row in (then, now)
            )
            part = _scored(benchmark, metric, old, new, *some)
            tried.append(part if part and part.metric == metric else None)
    present = [change for change in tried if change]
    scored = {(change.title, change.metric) for change in present}
    for name in new:
        parts = parse(name)
        if (
            name in old
            and parts.metric in WITHOUT_SCORES.get(parts.task, ())
            and (parts.title, parts.metric) not in scored
        ):
            present.append(Change(title=parts.title, metric=parts.metric, before=old[name], after=new[name]))
    return sorted(present, key=lambda change: VERDICTS.index(change.verdict))


def verdict(name: str, before: str, after: str, changes: Sequence[Change]) -> dict[str, Any]:
    """Return a comparison as pages show it: the changes by verdict, and `told`, its counts in words."""
    by_verdict = {
        verdict: [change for change in changes if change.verdict == verdict] for verdict in VERDICTS
    }
    better, worse, unclear = (len(by_verdict[verdict]) for verdict in VERDICTS[:3])
    headlines = [
        (
            "better" if better else "unclear",
            f"{better} figure{'s' * (better != 1)} improved" if better else "Nothing improved beyond chance",
        ),
        (
            "worse" if worse else "unclear",
            f"{worse} got worse" if worse else "nothing got worse beyond chance",
        ),
        *([("unclear", f"{unclear} did not clearly change")] if unclear else []),
    ]
    return {
        "name": name,
        "before": before,
        "after": after,
        "changes": changes,
        "by_verdict": by_verdict,
        "told": headlines,
    }


def paired(before: Mapping[Key, Answer], after: Mapping[Key, Answer]) -> list[Key]:
    """Return the samples that both have; none if they are fewer than half: other data may have some of the
    same ids and texts."""
    keys = [key for key, answer in after.items() if key in before and before[key].question == answer.question]
    return keys if 2 * len(keys) >= max(len(before), len(after)) else []


def _scored(
    benchmark: str,
    metric: str,
    old: dict[str, float],
    new: dict[str, float],
    before: dict[Key, Answer],
    after: dict[Key, Answer],
) -> Change | None:
    """Compare per-sample scores, paired, or those of other samples. None where one has fewer than two. It is
    called `metric` if the scores' mean is that."""
    keys = paired(before, after)
    pairs = len(keys) if keys else None
    first, last = ([row[key].score for key in keys or row] for row in (before, after))
    if min(len(first), len(last)) < 2:
        return None
    means = sum(first) / len(first), sum(last) / len(last)
    # scores are kept to four digits; where their mean is not the metric, they stand for themselves
    same = all(
        math.isclose(row.get(f"{benchmark}/{metric}", math.nan), mean, abs_tol=1e-3)
        for row, mean in zip((old, new), means, strict=True)
    )
    one, other = Ratio(numerators=first), Ratio(numerators=last)
    return Change(
        title=parse(benchmark).title,
        metric=metric if same else "mean score",
        before=means[0],
        after=means[1],
        interval=difference(other, one, paired=bool(pairs), resamples=RESAMPLES),
        pairs=pairs,
    )
