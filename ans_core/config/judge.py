"""Settings of the stage `judge_questions`, of judging in `rl`, and of rewording in `cota`."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from ans_core.config.section import Count, Impossible, Positive, Rate, Section, Weight


class Judge(Section):
    """Rewards captions by questions about the true caption: the stage `judge_questions` writes them, RL asks
    them."""

    model: str = ""
    """Model name at the endpoint; empty = by rules, without a language model (made for the drawn world)."""
    base_url: str = ""
    """URL of any OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1; empty = OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key, which is stored nowhere else."""
    positives: Positive = 4
    """Most questions per caption about details that are there."""
    negatives: Count = 3
    """Most questions per caption about details that are not there."""
    concurrency: Positive = 16
    """Concurrent calls, over all processes."""
    timeout_s: Rate = 30.0
    """Timeout of one attempt."""
    deadline_s: Rate = 60.0
    """Deadline for all judgements of a step, retries and pauses included; what is missing by then counts as
    failed."""
    retries: Count = 3
    price_in: Weight = 0.0
    """USD per million tokens."""
    price_out: Weight = 0.0
    max_cost_usd: Weight = 0.0
    """Once this is spent nothing more is asked in this run of the stage, over all processes; 0 = no limit."""
    meteor_weight: Weight = 0.25
    judge_weight: Weight = 0.75
    on_failure: Literal["meteor", "drop"] = "meteor"
    """If one judgement of a group is missing: reward the whole group by METEOR alone, or drop it."""
    cache: str = ".ans/judge.sqlite"
    """Cache of replies by endpoint, model and request; on a local disk."""

    @model_validator(mode="after")
    def _possible(self) -> Judge:
        address = urlsplit(self.base_url)
        if address.username or address.password or address.query:
            raise Impossible(
                "base_url",
                "base_url holds a user, a password or a query, which would stand in logs; give a key by "
                "judge.api_key_env",
            )
        if self.base_url and not self.model:
            raise Impossible("model", "base_url is set and model is empty: name the model at that endpoint")
        if self.max_cost_usd and not (self.price_in or self.price_out):
            raise Impossible(
                "max_cost_usd",
                "max_cost_usd needs price_in and price_out: without prices nothing costs anything",
            )
        if self.timeout_s > self.deadline_s:
            raise Impossible(
                "timeout_s", f"timeout_s ({self.timeout_s:g}) is longer than deadline_s ({self.deadline_s:g})"
            )
        if not self.meteor_weight + self.judge_weight:
            raise Impossible("judge_weight", "meteor_weight and judge_weight are both 0")
        return self
