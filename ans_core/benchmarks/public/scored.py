"""What a public benchmark's scorer gets and hands back: files in, figures with their counts out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ans_core.metrics.bootstrap import Ratio

Option = Literal["replay", "convention", "text_encoder"]


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


@dataclass(frozen=True, kw_only=True)
class Scorer:
    score: Callable[[Given], Scored]
    data: str
    """What --data holds; "" = it takes none."""
    needs_data: bool = True
    options: frozenset[Option] = frozenset()


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
