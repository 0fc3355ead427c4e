"""What a public benchmark's scorer gets and hands back: files in, figures with their counts out."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

    @property
    def truth(self) -> Path:
        """Return `data`, of a benchmark that needs it."""
        assert self.data is not None, "needs_data"
        return self.data

    def pair(self, predicted: Iterable[str], true: Iterable[str], *, what: str) -> tuple[list[str], int]:
        """Return the names that are scored, in the truth's order, and how many of them are not predicted.
        Raises ValueError for predictions of what the truth does not have."""
        names = list(true)
        missing = files.refuse_unknown(predicted, names, where=self.predictions, what=what)
        if self.predicted_only:
            left = set(missing)
            return [name for name in names if name not in left], 0
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
    scored_together: tuple[str, ...] = ()
    """Those of `ratios` in which a sample's share depends on the others that were scored: two evaluations are
    compared by them only if they have the same samples."""
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

    replies: Callable[[Inputs, Judge], Any]
    """Ask the judge and return the JSON value that is then scored, of `.jsonl` a list of its lines. It names
    the judge, and gives the same figures again."""
    replay: str
    """How somebody gives recorded replies instead."""
    needed: Callable[[Inputs], bool] = lambda inputs: inputs.replay is None
    """Without a judge these files can't be scored."""
    suffix: Literal[".json", ".jsonl"] = ".json"
    into: Literal["replay", "predictions"] = "replay"
    """The input that the replies are."""

    def ask(self, inputs: Inputs, judge: Judge, out: Path) -> Inputs:
        """Write the judge's replies to `out` and return what is then scored."""
        replies = self.replies(inputs, judge)
        lines = map(json.dumps, replies) if self.suffix == ".jsonl" else [json.dumps(replies, indent=1)]
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return replace(inputs, replay=out) if self.into == "replay" else replace(inputs, predictions=out)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    score: Callable[[Inputs], Scored]
    data: str = ""
    """What --data holds; "" = it takes none."""
    data_optional: bool = False
    options: frozenset[Option] = frozenset()
    sample_id: tuple[str, ...] = ("id",)
    """Keys of a record of `Scored.samples` that name the sample."""
    runner: Runner | None = None
    """None: it scores files alone."""
    judging: Judging | None = None

    @property
    def needs_data(self) -> bool:
        return bool(self.data) and not self.data_optional

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
    """Return each sample's value of the main metric: the first one that is a mean over samples, else the first
    to which every sample contributes a value of its own."""
    metrics = list(table[0].get("terms", {})) if table else []
    means = [name for name in metrics if all(row["terms"][name][1] == 1 for row in table)]
    shares = [name for name in metrics if all(row["terms"][name][1] > 0 for row in table)]
    metric = next(iter([*means, *shares]), None)
    if metric is None:
        return {}
    return {row["sample"]: row["terms"][metric][0] / row["terms"][metric][1] for row in table}


def mean(numbers: Iterable[float]) -> float:
    listed = list(numbers)
    return sum(listed) / len(listed)


def means_by_kind(samples: Iterable[tuple[Iterable[str], float]], name: str) -> dict[str, float]:
    """(kinds, value) of every sample -> `name/<kind>`, the mean of the samples of each kind."""
    of_kind: dict[str, list[float]] = defaultdict(list)
    for kinds, value in samples:
        for kind in set(kinds):
            of_kind[kind].append(value)
    return {f"{name}/{kind}": mean(values) for kind, values in sorted(of_kind.items())}


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
            f"accuracy{name}": mean(answers),
            f"correct{name}": sum(answers),
            f"count{name}": len(answers),
        }
    return metrics, Ratio(numerators=[float(answer) for answer in groups[""]])


def accuracies(figures: Mapping[str, float], digits: int) -> dict[str, str]:
    """Return the accuracies among the figures as a benchmark prints them."""
    return {key: percent(value, digits) for key, value in figures.items() if key.startswith("accuracy")}


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}"
