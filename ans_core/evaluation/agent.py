"""`ans eval BENCHMARK --model BASE --agent FOLDER`: the benchmark on a trained agent, without tools and with them, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from ans_core.evaluation import session as eval_run
from ans_core.places import root

WAYS = {False: "without_tools", True: "with_tools"}
"""Folders of the two evaluations."""


def run(name: str, arguments: argparse.Namespace) -> int:
    """Run both; the first process then compares them."""
    from ans_core import dist
    from ans_core.agent.answering import check
    from ans_core.benchmarks.public_run import missing, runner_of

    whole = eval_run.asked(name, arguments)
    runner = runner_of(name)
    if not missing(runner, whole.data, whole.split) and (first := next(iter(runner.questions(whole.data, whole.split)), None)) is not None:
        check(first)
    agent = cache(partial(Loaded, arguments))
    statuses = []
    try:
        for tools, folder in WAYS.items():
            way = replace(whole, out=whole.out / folder, settings=whole.settings | {"tools": tools})
            statuses.append(eval_run.evaluate(way, lambda tools=tools: agent()(tools), arguments))  # type: ignore[misc]
    finally:
        if agent.cache_info().currsize:
            agent().close()
    if dist.rank() == 0 and not any(statuses):
        compare(name, whole.out)
    return max(statuses)


def compare(name: str, out: Path) -> None:
    """Print and write what tools change, or print why that can't be told."""
    from ans_core.benchmarks.public_run import scorer_of
    from ans_core.evaluation import compare as eval_compare

    print("without tools -> with tools")
    try:
        eval_compare.compare(argparse.Namespace(names=[str(out / folder) for folder in WAYS.values()], out=out / "side_by_side"))
    except ValueError as error:  # no judge has read the answers, or there is only one; other benchmarks may follow
        judged = scorer_of(name)[1].judging is not None
        told = f"; or score both with `ans eval score {name} --replay`, and `ans eval compare` them" if judged else ""
        print(f"no comparison: {error}{told}")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what of the agent decides its answers."""
    from ans_core.agent.ocr import check_reader
    from ans_core.agent.policy import reader_of
    from ans_core.checkpoints.checkpoint import DELTA, DELTA_WEIGHTS
    from ans_core.checkpoints.folder import file_hash
    from ans_core.config import load

    folder = Path(arguments.agent)
    if not (folder / DELTA).is_file():
        raise ValueError(f"--agent {folder} holds no {DELTA}; give what `agent_sft` or `rft` wrote, as in runs/<profile>/agent/rft")
    reader = reader_of(folder, arguments.reader)
    check_reader(reader, setting="--reader")
    episode = load(root() / "params.yaml").agent.episode
    return {
        "agent": str(folder.resolve()),
        "adapter": file_hash(folder / DELTA_WEIGHTS),
        "adapter_config": file_hash(folder / DELTA),
        "episode": episode.model_dump(mode="json"),
        "max_tokens": arguments.max_tokens or episode.turn_tokens,
        "ocr": reader,
    }


class Loaded:
    """An agent ready to answer, in both ways."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from ans_core.agent.episode import Toolbox
        from ans_core.agent.operations import OPERATIONS
        from ans_core.agent.play import Limits
        from ans_core.agent.policy import load_policy, reader_of
        from ans_core.checkpoints import folder
        from ans_core.checkpoints.checkpoint import present_device
        from ans_core.config import load
        from ans_core.model import quantization
        from ans_core.precision import inference_dtype

        episode = load(root() / "params.yaml").agent.episode
        base, device = folder.local_folder(arguments.model), present_device(arguments.device or "auto")
        kind = quantization.check(arguments.quantize, device) if arguments.quantize else None
        trained = Path(arguments.agent)
        reader = reader_of(trained, arguments.reader)
        self.policy = load_policy(
            base, trained, operations=OPERATIONS, device=device, dtype=inference_dtype(device), quantize=kind, reader=reader
        )
        self.toolbox = Toolbox(self.policy.model, adapters_off=self.policy.base, seconds=episode.time_limit_s, reader=reader)
        self.told = self.policy.is_told(episode.operations_told)
        self.limits = replace(Limits.of(episode), turn_tokens=arguments.max_tokens or episode.turn_tokens)

    def __call__(self, tools: bool) -> Callable[..., Any]:
        from ans_core.agent.answering import answerer

        return answerer(self.policy, self.toolbox, limits=self.limits, told=self.told, tools=tools)

    def close(self) -> None:
        self.toolbox.close()
