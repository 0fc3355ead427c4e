"""Build the judge that the settings name."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from ans_core import dist
from ans_core.config import Config
from ans_core.judge.base import Judge
from ans_core.judge.chat import Price
from ans_core.judge.endpoint import EndpointJudge
from ans_core.judge.replies import Replies
from ans_core.judge.rules import RuleJudge


def is_judged(loops: Container[str], *, loop1: bool, loop2: bool) -> bool:
    """Tell whether a loop that is practised is judged: rl.loops, rl.use_llm_judge, rl.use_llm_judge_loop2."""
    return (loop1 and "caption" in loops) or (loop2 and "mask" in loops)


def judge_of(cfg: Config, *, deadline_s: float | None = None) -> Judge:
    """Build a judge; the caller must close it. `deadline_s` None: the setting's. Concurrent calls and the
    cost limit are this process's share."""
    return (
        endpoint_of(cfg, deadline_s=deadline_s, processes=dist.world_size())
        if cfg.judge.model
        else RuleJudge()
    )


def endpoint_of(cfg: Config, *, deadline_s: float | None = None, processes: int = 1) -> EndpointJudge:
    """Build the judge of an endpoint that so many processes ask; the caller must close it. `deadline_s` None:
    the setting's."""
    settings = cfg.judge
    limit = settings.max_cost_usd / processes
    return EndpointJudge(
        model=settings.model, base_url=settings.base_url, api_key_env=settings.api_key_env,
        cache=Path(settings.cache), concurrency=max(1, settings.concurrency // processes),
        timeout_s=settings.timeout_s, retries=settings.retries,
        deadline_s=settings.deadline_s if deadline_s is None else deadline_s,
        price=Price(tokens_in=settings.price_in, tokens_out=settings.price_out, limit=limit),
    )  # fmt: skip


def replies_of(cfg: Config, *, root: Path) -> Replies | None:
    """Build the judge of benchmarks, whose cache lies under `root`; None: the settings name no model."""
    settings = cfg.judge
    if not settings.model:
        return None
    price = Price(tokens_in=settings.price_in, tokens_out=settings.price_out, limit=settings.max_cost_usd)
    return Replies(
        model=settings.model, base_url=settings.base_url, api_key_env=settings.api_key_env,
        cache=root / settings.cache, concurrency=settings.concurrency, timeout_s=settings.timeout_s,
        retries=settings.retries, price=price,
    )  # fmt: skip
