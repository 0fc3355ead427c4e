"""Settings of the stage `convert`."""

from __future__ import annotations

from ans_core.config.section import Section


class Convert(Section):
    max_shard: str = "5GB"
