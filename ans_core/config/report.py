"""Settings of the stage `report`."""

from __future__ import annotations

from ans_core.config.section import Count, Section


class Report(Section):
    overlays: Count = 48
    """Pictures of each stage, spread over the benchmarks."""
