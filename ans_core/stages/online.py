"""online: the agent after RL and a simulated stream of shifted questions in; what learning online from them
did, for every arm, out.

    dvc repro online/dvc.yaml:online

Every arm begins with the same weights and gets the same stream through the real engine, store and worker.
Measured is on questions of their own, never on the stream: `target` has its shift, `source` has none. Several
processes run an arm each in turn, every one by itself.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from ans_core import dist
from ans_core.agent.evaluation import accuracy, outcome_of
from ans_core.agent.ocr import check_reader
from ans_core.config import Config
from ans_core.online import overview
from ans_core.online.engine import Engine, Query
from ans_core.online.simulation import STREAM_FROM, QuestionStream, poisoning, wrong_on
from ans_core.online.store import Task
from ans_core.online.worker import Worker
from ans_core.stages.launch import machine_of, show_precision
from ans_core.stages.online_parts import SERVED, Guard, Parts, loop_of, opened, schedule, worker_of
from ans_core.train import loop
from ans_core.train.loop import Curves, Machine
from ans_core.types import Log
from ans_core.written import write_atomically

STORE, ROWS, RESULT = "store", "rows.jsonl", "result.json"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What an arm of the comparison does."""

    guard: Guard = field(default_factory=Guard)
    wrong: bool = False
    """Its verifier is wrong on a share of the questions."""
    poisoned: bool = False
    """A share of its labels is replaced by one answer."""


UNGUARDED = Guard(admission=False, verification=False, update=False, release=False)
ARMS: dict[str, Arm | None] = {
    "frozen": None,
    "naive": Arm(guard=UNGUARDED),
    "naive_canary": Arm(guard=replace(UNGUARDED, release=True)),
    "guard": Arm(guard=Guard(verification=False)),
    "guard_verified": Arm(),
    "wrong_verifier": Arm(wrong=True),
    "poisoned": Arm(poisoned=True),
}


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: model, agent/rft. Writes online.json (arm -> figures at the end) and curves.csv
    (by arm and update)."""
    check_reader(cfg.agent.reader)
    machine = machine_of(cfg.launch)
    if machine.device.type == "cuda":
        torch.cuda.set_device(machine.device)  # an arm's training takes the current one
    base, arms = inputs["model"], cfg.agent.online.simulation.arms
    local_arms = arms[dist.rank() :: dist.world_size()]
    with dist.alone():
        for name in local_arms:
            folder = scratch / name
            if not (folder / RESULT).exists():
                made = run_arm(
                    cfg,
                    ARMS[name],
                    base=base,
                    start=inputs["agent/rft"],
                    folder=folder,
                    machine=machine,
                    log=named(log, name),
                )
                write_atomically(folder / RESULT, json.dumps(made))
    with dist.process_group():
        dist.wait_for_all()
    arm_figures: dict[str, dict[str, float]] = {}
    curves: dict[str, Curves] = {}
    for name in arms:
        arm_figures[name], rows = json.loads((scratch / name / RESULT).read_text(encoding="utf-8"))
        curves[name] = [(int(step), str(key), float(value)) for step, key, value in rows]
        log_arm = named(log, name)
        for step, metrics in by_step(curves[name] if name not in local_arms else []).items():
            log_arm({f"online/{key}": value for key, value in metrics.items()}, step)
        log_arm(arm_figures[name], 0)
    if dist.rank() == 0:
        loop.write_curves(out / "curves.csv", curves)
        (out / "online.json").write_text(json.dumps(arm_figures, indent=2, sort_keys=True) + "\n")
    return {f"{name}/{key}": value for name, figures in arm_figures.items() for key, value in figures.items()}


def by_step(curves: Curves) -> dict[int, dict[str, float]]:
    """Return the metrics of every update: those of an arm that another process ran are logged at the end."""
    steps: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for step, name, value in curves:
        steps[step][name] = value
    return steps


def named(log: Log, arm: str) -> Log:
    """Return a log whose metrics begin with the arm's name."""
    return lambda metrics, step: log({f"{arm}/{name}": value for name, value in metrics.items()}, step)


def run_arm(
    cfg: Config, arm: Arm | None, *, base: Path, start: Path, folder: Path, machine: Machine, log: Log
) -> tuple[dict[str, float], Curves]:
    """Return an arm's figures at the end, and its curves. A killed one goes on from its last training
    state."""
    if not list((folder / "online").glob("step-*")):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    families = cfg.agent.online.simulation.families
    with opened(
        cfg, base=base, start=start, folder=folder / STORE, machine=machine, families=families
    ) as parts:
        show_precision(parts.policy.model, log)
        stream = Stream(parts)
        if arm is None:
            return measured(parts), []
        settings, rows = cfg.agent.online, folder / ROWS
        wrong = settings.simulation.wrong if arm.wrong else 0.0
        poison = settings.simulation.poison if arm.poisoned else 0.0
        worker = worker_of(
            parts, waits=False, guard=arm.guard, wrap=partial(wrong_on, share=wrong, seed=cfg.seed),
            relabel=poisoning(poison, seed=cfg.seed), truth=stream.truth, before_batch=stream.fill,
        )  # fmt: skip
        stream.worker = worker

        def logged(metrics: dict[str, float], step: int) -> None:
            log(metrics, step)
            now = {name.removeprefix("online/"): value for name, value in metrics.items()}
            if (step + 1) % settings.simulation.every == 0 and step + 1 < settings.update.optim.steps:
                now |= measured(parts)
            with rows.open("a") as file:
                file.write(json.dumps([step, now]) + "\n")

        module = loop_of(parts, worker, guard=arm.guard, log=log)
        worker.run(module, schedule=schedule(cfg), machine=machine, scratch=folder, log=logged)
        curves = read_rows(rows)
        return measured(parts) | of_store(parts) | of_curves(curves), curves


def read_rows(path: Path) -> Curves:
    """Return what was logged. An update that was done twice, before and after a kill, counts as it was
    last."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    updates = {int(step): metrics for step, metrics in map(json.loads, lines)}
    return [
        (step, name, float(value))
        for step, metrics in sorted(updates.items())
        for name, value in metrics.items()
    ]


class Stream:
    """Shifted questions as they come, answered by the engine: enough for the next update, the same for every
    arm."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.shifted = shifted(parts, split="train")
        self.cold = parts.cfg.agent.online.admission.cold_start
        self.engine: Engine = parts.engine()
        self.worker: Worker | None = None

    def fill(self, step: int) -> None:
        """Ask until an update's tasks are there. What update `step` gets depends on it alone: asked again, a
        question is kept once."""
        assert self.worker is not None, "the worker says how many it takes"
        each = self.worker.settings.tasks
        begin = max(0, self.cold - each)
        first, last = (0, begin + each) if step == 0 else (begin + step * each, begin + (step + 1) * each)
        most = self.parts.store.limits.queue
        for place in range(first, last, most):
            questions = [self.shifted.number(number) for number in range(place, min(last, place + most))]
            self.engine.answer(
                [
                    Query(request=q.question_id, question=q.text, frames=q.frames, clip=len(q.frames) > 1)
                    for q in questions
                ]
            )

    def truth(self, task: Task) -> str | None:
        return self.shifted.named(task.request).answer


def shifted(parts: Parts, *, split: str) -> QuestionStream:
    return parts.questions(split=split, first=STREAM_FROM, shift=parts.cfg.agent.online.simulation.shift)


# Figures


def measured(parts: Parts) -> dict[str, float]:
    """Return accuracy of what is served on held-out questions, with the stream's shift and without."""
    settings = parts.cfg.agent.online.simulation
    count = settings.each * len(settings.families)
    sets = {
        "target": shifted(parts, split="val"),
        "source": parts.questions(split="val", first=STREAM_FROM),
    }
    figures = {}
    for name, source in sets.items():
        questions = [source.number(number) for number in range(count)]
        played = parts.play(SERVED, [parts.ask(question.text, question.frames) for question in questions])
        figures[name] = accuracy([outcome_of(*pair) for pair in zip(questions, played, strict=True)])
    return figures


def of_store(parts: Parts) -> dict[str, float]:
    """Return what the store says at the end."""
    counts = overview.counts(parts.store)
    names = (
        "experiences", "vectors", "admitted", "below_gate", "not_verified", "flipped", "stale", "flooded",
        "unreadable", "not_finite",
    )  # fmt: skip
    figures = {f"store/{name}": float(counts.get(name, 0)) for name in names}
    return figures | {"store/frozen": float(parts.snapshots.frozen() is not None)}


CURVES = {
    "agent/label_right": "labels_right",
    "agent/reward_right": "rewards_right",
    "agent/admitted": "admitted",
    "agent/share": "vote_share",
    "agent/answer_entropy": "answer_entropy",
    "online/flip_rate": "flip_rate",
    "online/roll_backs": "roll_backs",
    "online/kl": "last_kl",
    "online/beta": "beta",
}
"""Curve -> figure."""


def of_curves(curves: Curves) -> dict[str, float]:
    """Return the number of updates, means over all of them, and the last value of what adds up."""
    figures: dict[str, float] = {"updates": float(1 + max((step for step, *_ in curves), default=-1))}
    for name, figure in CURVES.items():
        values = [value for _, curve, value in curves if curve == name]
        if values:
            last = figure in ("roll_backs", "last_kl", "beta")
            figures[figure] = values[-1] if last else sum(values) / len(values)
    return figures
