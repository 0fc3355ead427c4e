"""`ans eval BENCHMARK --model BASE --agent FOLDER`: the benchmark on a trained agent, without tools and with
them, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ans_core.benchmarks.public.asked import Answerer, Item
from ans_core.places import root
from ans_core.types import Prediction

if TYPE_CHECKING:
    from ans_core.evaluation.session import Session

WAYS = {False: "without_tools", True: "with_tools"}
"""Folders of the two evaluations."""


@contextmanager
def ways(session: Session, arguments: argparse.Namespace) -> Iterator[list[tuple[Session, Answerer]]]:
    """Yield both evaluations; the agent is loaded at the first question. Raises ValueError for questions that
    are not in words alone."""
    from ans_core.agent.answering import check, counting, note

    first = None if session.absent else next(session.runner.questions(session.data, session.split), None)
    if first is not None:
        check(first)
    agent = cache(partial(Loaded, arguments))
    counted = replace(session, runner=counting(session.runner), note=note)

    def answer(tools: bool, items: Sequence[Item]) -> list[Prediction]:
        return agent().answerer(tools)(items)

    try:
        yield [
            (
                replace(counted, out=session.out / folder, settings=session.settings | {"tools": tools}),
                partial(answer, tools),
            )
            for tools, folder in WAYS.items()
        ]
    finally:
        if agent.cache_info().currsize:
            agent().close()


def compare(session: Session) -> None:
    """Print and write what tools change, or print why that can't be told."""
    from ans_core.evaluation import compare as eval_compare

    print("without tools -> with tools")
    try:
        eval_compare.compare(
            [str(session.out / folder) for folder in WAYS.values()], session.out / "side_by_side"
        )
    except (
        ValueError
    ) as error:  # no judge has read the answers, or there is only one; other benchmarks may follow
        judged = session.scorer.judging is not None
        advice = (
            f"; or score both with `ans eval score {session.name} --replay`, and `ans eval compare` them"
            if judged
            else ""
        )
        print(f"no comparison: {error}{advice}")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what of the agent decides its answers."""
    from ans_core.agent.ocr import check_reader
    from ans_core.agent.policy import reader_of
    from ans_core.checkpoints.checkpoint import DELTA, DELTA_WEIGHTS
    from ans_core.checkpoints.folder import file_hash
    from ans_core.config import load

    folder = Path(arguments.agent)
    if not (folder / DELTA).is_file():
        raise ValueError(
            f"--agent {folder} holds no {DELTA}; give what `agent_sft` or `rft` wrote, as in "
            "runs/<profile>/agent/rft"
        )
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
            base,
            trained,
            operations=OPERATIONS,
            device=device,
            dtype=inference_dtype(device),
            quantize=kind,
            reader=reader,
        )
        self.toolbox = Toolbox(
            self.policy.model, adapters_off=self.policy.base, seconds=episode.time_limit_s, reader=reader
        )
        self.lists_operations = self.policy.lists_operations(episode.operations_told)
        self.limits = episode.model_copy(update={"turn_tokens": arguments.max_tokens or episode.turn_tokens})

    def answerer(self, tools: bool) -> Answerer:
        from ans_core.agent.answering import answerer

        return answerer(
            self.policy, self.toolbox, limits=self.limits, with_operations=self.lists_operations, tools=tools
        )

    def close(self) -> None:
        self.toolbox.close()
