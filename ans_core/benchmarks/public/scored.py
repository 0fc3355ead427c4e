"""What a public benchmark's scorer gets and hands back: files in, figures with their counts out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Runner
from ans_core.judge.wording import Request as JudgeRequest
from ans_core.metrics.bootstrap import Ratio, intervals

Option = Literal["replay", "convention", "text_encoder", "predicted_only", "split"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    predictions: Path
    data: Path | None = None
    """The benchmark's own files: truth, questions."""
    replay: Path | None = None
    """A judge's recorded replies."""
    convention: str | None = None
    text_encoder: str | None = None
    """Folder or hub id of the encoder that says whether two phrases mean the same."""
    split: str = ""
    """Of the data set in `data`; "" = all that is there."""
    predicted_only: bool = False
    """Only what is predicted is scored: a run with --limit. Otherwise a missing prediction counts 0."""

    def pair(self, predicted: Iterable[str], true: Iterable[str], *, what: str) -> tuple[list[str], int]:
        """Return the names that are scored, in the truth's order, and how many of them are not predicted.
        Raises ValueError for predictions of what the truth does not have."""
        names = list(true)
        missing = files.refuse_unknown(predicted, names, where=self.predictions, what=what)
        if self.predicted_only:
            return [name for name in names if name not in set(missing)], 0
        return names, len(missing)


@dataclass(frozen=True, kw_only=True)
class Scored:
    metrics: dict[str, float]
    """Unrounded, shares in [0, 1] unless the benchmark counts otherwise. A figure that nothing speaks for is
    left out."""
    published: dict[str, str] = field(default_factory=dict)
    """Main figures as the benchmark's own scorer prints them (percent, rounded)."""
    ratios: dict[str, Ratio] = field(default_factory=dict)
    """Metrics whose bootstrap interval is worth knowing, as per-sample counts."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """One record a sample, for the table."""
    missing: int = 0
    """Predictions that were not there. They count 0."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures must know: the judge, the convention, what was left out."""

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % bootstrap intervals."""
        return intervals(self.ratios)


@runtime_checkable
class Judge(Protocol):
    @property
    def name(self) -> str:
        """What a figure calls it."""

    def ask(self, requests: Sequence[JudgeRequest], *, desc: str) -> list[str]:
        """Return the reply to each request."""


@dataclass(frozen=True, kw_only=True)
class Judging:
    """How a judge is asked about predictions."""

    needed: Callable[[Inputs], bool]
    """Without a judge these files can't be scored."""
    ask: Callable[[Inputs, Judge, Path], Inputs]
    """Write the judge's replies to the file, and return what is then scored. The file names the judge, and
    gives the same figures again."""
    suffix: str
    replay: str
    """How somebody gives recorded replies instead."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    score: Callable[[Inputs], Scored]
    data: str
    """What --data holds; "" = it takes none."""
    needs_data: bool = True
    options: frozenset[Option] = frozenset()
    sample_id: tuple[str, ...] = ("id",)
    """Keys of a record of `Scored.samples` that name the sample."""
    runner: Runner | None = None
    """None: it scores files alone."""
    judging: Judging | None = None

    def table(self, scored: Scored) -> Iterator[dict[str, Any]]:
        """Yield the samples' records with `sample`, their name, and `terms` {metric: [numerator,
        denominator]}, from which two systems are compared sample by sample."""
        terms = {
            key: ratio.terms().tolist()
            for key, ratio in scored.ratios.items()
            if len(ratio.numerators) == len(scored.samples)
        }
        for number, sample in enumerate(scored.samples):
            name = "/".join(str(sample[key]) for key in self.sample_id if key in sample)
            yield {"sample": name, **sample, "terms": {key: values[number] for key, values in terms.items()}}


def scores_of(table: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each sample's value of the main metric: the first one that is a mean over samples."""
    metric = main_metric(table)
    return (
        {}
        if metric is None
        else {row["sample"]: row["terms"][metric][0] / row["terms"][metric][1] for row in table}
    )


def main_metric(table: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first metric to which every sample contributes a value of its own."""
    terms: Mapping[str, Any] = table[0].get("terms", {}) if table else {}
    means = [name for name in terms if all(row["terms"][name][1] == 1 for row in table)]
    return next(
        iter(means or [name for name in terms if all(row["terms"][name][1] > 0 for row in table)]), None
    )


def accuracy(right: Iterable[tuple[str, bool]]) -> tuple[dict[str, float], Ratio]:
    """(group, right or not) of every sample -> `accuracy`, `correct`, `count` over all and `accuracy/<group>`
    and so on for each but "", which is none."""
    listed = list(right)
    groups: dict[str, list[bool]] = {"": [answer for _, answer in listed]}
    for group, answer in listed:
        if group:
            groups.setdefault(f"/{group}", []).append(answer)
    metrics: dict[str, float] = {}
    for name, answers in groups.items():
        metrics |= {
            f"accuracy{name}": sum(answers) / len(answers),
            f"correct{name}": sum(answers),
            f"count{name}": len(answers),
        }
    return metrics, Ratio(numerators=[float(answer) for answer in groups[""]])


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}"
