"""What a public benchmark's scorer gets and hands back: files in, figures with their counts out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ans_core.benchmarks.public.asked import Runner
from ans_core.metrics.bootstrap import Ratio, interval

Option = Literal["replay", "convention", "text_encoder", "predicted_only"]


@dataclass(frozen=True, kw_only=True)
class Given:
    predictions: Path
    data: Path | None = None
    """The benchmark's own files: truth, questions."""
    replay: Path | None = None
    """A judge's recorded replies."""
    convention: str | None = None
    text_encoder: str | None = None
    """Folder or hub id of the encoder that says whether two phrases mean the same."""
    predicted_only: bool = False
    """Only what is predicted is scored: a run with --limit. Otherwise a missing prediction counts 0."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    metrics: dict[str, float]
    """Unrounded, shares in [0, 1] unless the benchmark counts otherwise. A figure that nothing speaks for is left out."""
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
        return {key: interval(ratio) for key, ratio in self.ratios.items() if len(ratio.numerators) > 1}


@dataclass(frozen=True, kw_only=True)
class Scorer:
    score: Callable[[Given], Scored]
    data: str
    """What --data holds; "" = it takes none."""
    needs_data: bool = True
    options: frozenset[Option] = frozenset()
    sample_id: tuple[str, ...] = ("id",)
    """Keys of a record of `Scored.samples` that name the sample."""
    runner: Runner | None = None
    """None: it scores files alone."""

    def table(self, scored: Scored) -> Iterator[dict[str, Any]]:
        """Yield the samples' records with `sample`, their name, and `terms` {metric: [numerator, denominator]}, from which two systems are
        compared sample by sample."""
        terms = {key: ratio.terms().tolist() for key, ratio in scored.ratios.items() if len(ratio.numerators) == len(scored.samples)}
        for number, sample in enumerate(scored.samples):
            name = "/".join(str(sample[key]) for key in self.sample_id if key in sample)
            yield {"sample": name, **sample, "terms": {key: values[number] for key, values in terms.items()}}


def accuracy(right: Iterable[tuple[str, bool]]) -> tuple[dict[str, float], Ratio]:
    """(group, right or not) of every sample -> `accuracy`, `correct`, `count` over all and `accuracy/<group>` and so on for each."""
    listed = list(right)
    groups: dict[str, list[bool]] = {"": [answer for _, answer in listed]}
    for group, answer in listed:
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
