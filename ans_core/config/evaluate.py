"""Settings of the stage `evaluate`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import model_validator

from ans_core.config.names import BenchmarkName, PublicName
from ans_core.config.prepare import DataSource
from ans_core.config.section import ConfigError, Count, Listed, Name, Positive, Section, no_twice


class PublicBenchmark(Section):
    """A public benchmark, asked and scored as `ans eval` does."""

    name: PublicName
    path: Name
    split: str = ""
    """Empty = the folder's own, or the benchmark's first."""
    limit: Count = 0
    """Questions, at equal steps through all of them, rounded up to whole groups (MMBench's rotations, MME's
    pairs); 0 = all."""
    max_tokens: Positive = 512
    files: str = ""
    """Fingerprint, as of a data set."""


class Evaluate(Section):
    benchmarks: Listed[BenchmarkName] = (
        "referring",
        "region_caption",
        "grounded_caption",
        "video",
        "loops",
    )
    """Each needs samples in `split`: in a drawn set, one of the user's, or evaluate.sources."""
    optional: Listed[BenchmarkName] = ()
    """Benchmarks that are skipped, instead of refused, if there are no samples for them."""
    split: Name = "val"
    limit: Count = 0
    """Samples per benchmark; 0 = all."""
    loop_samples: Positive = 300
    """Number of regions on which the two loops are measured."""
    video_mode: Literal["auto", "sa2va", "sa2va-i", "keyframe"] = "auto"
    """How masks are propagated through clips; auto = sa2va-i if the model keeps SAM2's original mask
    decoder."""
    batch: Positive = 32
    max_tokens: Positive = 48
    overlays: Count = 24
    sources: Listed[DataSource] = ()
    """Evaluated only, never trained on (format `videos`, `regions`, ...)."""
    public: Listed[PublicBenchmark] = ()
    """Public benchmarks, of every row. One whose files are missing, or that a judge must read, is skipped and
    says so in skipped.json."""

    @model_validator(mode="after")
    def _possible(self) -> Evaluate:
        no_twice(self.benchmarks, key="benchmarks")
        no_twice([f"{one.name}, split {one.split or 'default'}" for one in self.public], key="public")
        return self


def require_samples(settings: Evaluate, available: Collection[str]) -> None:
    """Raise ConfigError for benchmarks without samples in any data (`available` names those with samples),
    unless they are optional."""
    missing = [
        name for name in settings.benchmarks if name not in available and name not in settings.optional
    ]
    if missing:
        raise ConfigError(
            f"no data set has samples of split {settings.split!r} for {', '.join(missing)} of "
            "evaluate.benchmarks: add data, name them in evaluate.optional, or take them out"
        )
