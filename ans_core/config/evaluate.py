"""Settings of the stage `evaluate`."""

from __future__ import annotations

from typing import Literal

from ans_core.config.prepare import DataSource
from ans_core.config.section import Count, Positive, Section


class Evaluate(Section):
    benchmarks: tuple[str, ...] = ("referring", "region_caption", "grounded_caption", "video", "loops")
    split: str = "val"
    limit: Count = 0
    """Samples per benchmark; 0 = all."""
    loop_samples: Positive = 300
    """Regions that the two loops are measured on."""
    video_mode: Literal["auto", "sa2va", "sa2va-i"] = "auto"
    """How masks go through clips; auto = sa2va-i where the model keeps SAM2's original mask decoder."""
    batch: Positive = 32
    max_tokens: Positive = 48
    overlays: Count = 24
    sources: tuple[DataSource, ...] = ()
    """Evaluated only, never trained on (format `videos`, `regions`, ...)."""
