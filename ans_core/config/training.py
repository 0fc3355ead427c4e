"""Settings that several training stages share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ans_core.config.section import Positive, Rate, Section, Share


class Optim(Section):
    """AdamW, linear warm-up, cosine to zero."""

    steps: Positive
    batch: Positive
    """Images (or clips) per optimizer step, over all processes."""
    lr: Rate
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    warmup: Share = 0.05
    clip_grad: Rate = 1.0
    accumulate: Positive = 1
    save_every: Positive = 100
    """Steps between resumable training states."""


class Lora(Section):
    rank: Positive = 16
    alpha: Positive = 32
    dropout: Share = 0.0
