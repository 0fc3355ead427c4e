"""Build the judge that the settings name."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from ans_core import dist
from ans_core.config import Config
from ans_core.judge.base import Judge
from ans_core.judge.chat import Endpoint, Price
from ans_core.judge.endpoint import EndpointJudge
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
    return EndpointJudge(
        _endpoint(cfg, processes=processes),
        cache=Path(cfg.judge.cache),
        deadline_s=cfg.judge.deadline_s if deadline_s is None else deadline_s,
    )


def benchmarks_judge(cfg: Config, *, root: Path) -> EndpointJudge | None:
    """Build the judge of benchmarks, whose cache lies under `root`; the caller must close it. None: the
    settings name no model."""
    if not cfg.judge.model:
        return None
    return EndpointJudge(_endpoint(cfg), cache=root / cfg.judge.cache, deadline_s=None)


def _endpoint(cfg: Config, *, processes: int = 1) -> Endpoint:
    """Return one process's share of the endpoint."""
    judge = cfg.judge
    limit = judge.max_cost_usd / processes
    return Endpoint(
        model=judge.model, base_url=judge.base_url, api_key_env=judge.api_key_env,
        concurrency=max(1, judge.concurrency // processes), timeout_s=judge.timeout_s, retries=judge.retries,
        price=Price(tokens_in=judge.price_in, tokens_out=judge.price_out, limit=limit),
    )  # fmt: skip
