"""Compare two rows' metrics and per-sample scores: what changed, by how much, and how certain that is."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ans_core.metrics.bootstrap import Ratio, interval
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
"""Also in the verdict, as plain differences where there is no score of theirs for each sample (earlier runs have none of the loops)."""
RESAMPLES = 2000
Verdict = Literal["better", "worse", "unclear", "no interval"]
VERDICTS: tuple[Verdict, ...] = ("better", "worse", "unclear", "no interval")
Key = tuple[str, str, int]
"""Data set, sample id, and the record's number among those with that id."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    score: float
    asked: str


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
    path = folder / "predictions.jsonl" if folder else None
    if not path or not path.exists():
        return {}
    answers: Answers = defaultdict(dict)
    seen: Counter[tuple[str, str, str]] = Counter()
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                where = (str(record["benchmark"]), str(record["dataset"]), str(record["sample_id"]))
                answer = Answer(score=float(record["score"]), asked=str(record["asked"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} line {number}: no prediction with a score ({error!r}); run its evaluate stage again") from error
            if not math.isfinite(answer.score):
                raise ValueError(f"{path} line {number}: score {answer.score} of sample {where[2]!r}; run its evaluate stage again")
            answers[where[0]][where[1], where[2], seen[where]] = answer
            seen[where] += 1
    return dict(answers)


def changes(summary: Summary, answers: Mapping[str, Answers], before: str, after: str) -> list[Change]:
    """Return the changes of row `after` against row `before`, in the order of VERDICTS."""
    old, new = summary.get(before, {}), summary.get(after, {})
    found = [
        change
        for benchmark in answers.get(after, {})
        if (change := _scored(benchmark, old, new, answers.get(before, {}).get(benchmark, {}), answers[after][benchmark]))
    ]
    scored = {(change.title, change.metric) for change in found}
    for name in new:
        parts = parse(name)
        if name in old and parts.metric in WITHOUT_SCORES.get(parts.task, ()) and (parts.title, parts.metric) not in scored:
            found.append(Change(title=parts.title, metric=parts.metric, before=old[name], after=new[name]))
    return sorted(found, key=lambda change: VERDICTS.index(change.verdict))


def _scored(
    benchmark: str, old: dict[str, float], new: dict[str, float], before: dict[Key, Answer], after: dict[Key, Answer]
) -> Change | None:
    """Compare per-sample scores; None if the rows have fewer than two samples in common."""
    keys = [key for key in after if key in before]
    if len(keys) < 2:
        return None
    first, last = ([row[key].score for key in keys] for row in (before, after))
    means = sum(first) / len(keys), sum(last) / len(keys)
    parts = parse(benchmark)
    metric = SCORED_BY.get(parts.task, "")
    # scores are kept to four digits; where their mean is not the metric, they stand for themselves
    same = all(
        math.isclose(row.get(f"{benchmark}/{metric}", math.nan), mean, abs_tol=1e-3) for row, mean in zip((old, new), means, strict=True)
    )
    return Change(
        title=parts.title,
        metric=metric if same else "mean score",
        before=means[0],
        after=means[1],
        interval=interval(Ratio(numerators=[b - a for a, b in zip(first, last, strict=True)]), resamples=RESAMPLES),
        pairs=len(keys),
    )
