"""Settings of the stage `judge_questions` and of judging in `rl`."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from ans_core.config.section import Count, Positive, Rate, Section


class Judge(Section):
    """Rewards captions by questions about the true one: the stage `judge_questions` writes them, RL asks them."""

    model: str = ""
    """Name at the endpoint; empty = by rules, without a language model (made for the drawn world)."""
    base_url: str = ""
    """Of any OpenAI-compatible endpoint, as in http://127.0.0.1:8000/v1; empty = OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, which stands nowhere else."""
    positives: Positive = 4
    """Questions per caption about details that are there, at most."""
    negatives: Count = 3
    """And about details that are not."""
    concurrency: Positive = 16
    """Calls at a time, over all processes."""
    timeout_s: Rate = 30.0
    """Of one attempt."""
    deadline_s: Rate = 60.0
    """Of all judgements of a step, retries and pauses included; what is not there by then counts as failed."""
    retries: Count = 3
    price_in: Annotated[float, Field(ge=0)] = 0.0
    """USD per million tokens."""
    price_out: Annotated[float, Field(ge=0)] = 0.0
    max_cost_usd: Annotated[float, Field(ge=0)] = 0.0
    """From then on nothing is asked any more, in this run of the stage, over all processes; 0 = no limit."""
    meteor_weight: Annotated[float, Field(ge=0)] = 0.25
    judge_weight: Annotated[float, Field(ge=0)] = 0.75
    on_failure: Literal["meteor", "drop"] = "meteor"
    """Where one judgement of a group is missing, the whole group is paid by METEOR alone, or left out."""
    cache: str = ".ans/judge.sqlite"
    """Replies by what was asked; on a local disk."""

    @model_validator(mode="after")
    def _possible(self) -> Judge:
        address = urlsplit(self.base_url)
        if address.username or address.password or address.query:
            raise ValueError("base_url holds a user, a password or a query, which would stand in logs; give a key by judge.api_key_env")
        if self.base_url and not self.model:
            raise ValueError("base_url is set and model is empty: name the model at that endpoint")
        if self.max_cost_usd and not (self.price_in or self.price_out):
            raise ValueError("max_cost_usd needs price_in and price_out: without prices nothing costs anything")
        if self.timeout_s > self.deadline_s:
            raise ValueError(f"timeout_s ({self.timeout_s:g}) is longer than deadline_s ({self.deadline_s:g})")
        if not self.meteor_weight + self.judge_weight:
            raise ValueError("meteor_weight and judge_weight are both 0")
        return self
