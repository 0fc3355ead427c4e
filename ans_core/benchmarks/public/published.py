"""Figures of other systems, with their sources, to set beside one's own (published.json; percent, as they are printed there)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Published:
    model: str
    benchmark: str
    split: str
    metric: str
    value: float
    source: str
    note: str = ""
    """What differs in the protocol; the judge of a judged figure."""


def published(benchmark: str) -> list[Published]:
    text = resources.files("ans_core.benchmarks.public").joinpath("published.json").read_text(encoding="utf-8")
    return [Published(**row) for row in json.loads(text) if row["benchmark"] == benchmark]
