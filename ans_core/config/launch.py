"""Settings of where training stages run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ans_core.config.section import Count, Positive, Section


class Launch(Section):
    """How training stages start. No stage depends on it: it changes where things run, not what is computed."""

    processes: Positive = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deepspeed_stage: Annotated[int, Field(ge=0, le=3)] = 0
    deterministic: bool = True
    threads: Count = 0
    """CPU threads; 0 = all."""
    workers: Count = 0
    """Processes that prepare batches ahead."""
