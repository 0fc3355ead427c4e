"""agent_evaluate: an agent and held-out questions in; figures by family, controls, and episodes turn by turn
out.

    dvc repro agent/dvc.yaml:agent_evaluate@sft

`row` is direct (taught to answer at once), oracle (the shortest plans on the real operations: the ceiling),
sft or rft. Several processes play a batch each in turn, and all know all outcomes: the figures are those of
one process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from ans_core import data, dist
from ans_core.agent import controls, tokens
from ans_core.agent.album import album_entry, chosen, write_album
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import (
    Outcome,
    metrics,
    operations_told,
    outcome_of,
    outcome_of_episode,
    request_of,
)
from ans_core.agent.ocr import check_reader
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import Change, PlayedEpisode, play
from ans_core.agent.policy import AgentPolicy, load_policy
from ans_core.agent.protocol import call_text
from ans_core.agent.world import Question, oracle
from ans_core.agent.world.annotated import TELLING_PLANS
from ans_core.agent.world.bank import QuestionBank
from ans_core.agent.world.question_sets import is_question_set
from ans_core.benchmarks import BENCHMARKS
from ans_core.config import Config
from ans_core.inference.predict import on_all_processes, predict
from ans_core.precision import inference_dtype
from ans_core.stages.launch import machine_of, show_precision
from ans_core.stages.operations import base_of, toolbox_of
from ans_core.types import Log, Sample

POLICIES = {"direct": "agent/sft/direct", "sft": "agent/sft/tools", "rft": "agent/rft"}
"""Row -> the input folder of its adapter."""
CONTROLS = ("forbidden", "random", "shuffled", "blank", "plan")
"""What rows that call are also asked under: no calls (only words of answers can be said, or an agent that
always calls would say parts of calls); calls at random places; observations of other questions of the family;
blank ones; the shortest plan given, so that only the answer is the model's (without TELLING_PLANS)."""


def run(
    cfg: Config, *, row: str, inputs: dict[str, Path], out: Path, scratch: Path, log: Log
) -> dict[str, float]:
    """Run the stage. inputs: data, model, agent/cota, the row's adapter. Writes metrics.json, and episodes.json with
    pictures in `episodes`."""
    check_reader(cfg.agent.reader)
    with dist.process_group():
        figures = measure(cfg, row=row, inputs=inputs, out=out, log=log)
    if dist.rank() == 0:
        (out / "metrics.json").write_text(json.dumps(figures, indent=1, sort_keys=True))
    log({f"{row}/{name}": value for name, value in figures.items()}, 0)
    return figures


def measure(cfg: Config, *, row: str, inputs: dict[str, Path], out: Path, log: Log) -> dict[str, float]:
    settings, path = cfg.agent.evaluate, inputs["model"]
    device = machine_of(cfg.launch).device
    if row == "oracle":
        return ceiling(cfg, path, device, cota=inputs["agent/cota"])
    policy = load_policy(
        path,
        inputs[POLICIES[row]],
        operations=OPERATIONS,
        device=device,
        dtype=inference_dtype(device),
        reader=cfg.agent.reader,
    )
    show_precision(policy.model, log)
    figures = _of_policy(cfg, policy, row, out, cota=inputs["agent/cota"])
    if settings.referring and row != "direct":
        figures |= referring(cfg, policy, inputs["data"])
    return figures


class HeldOut:
    """The questions that rows are compared on, each drawn once, and by the process that plays it."""

    def __init__(self, cfg: Config, toolbox: Toolbox, cota: Path) -> None:
        self.split = cfg.agent.evaluate.split
        self.bank = QuestionBank.of_cota(
            cfg.agent.families, cota, seed=cfg.seed, tile=toolbox.tile, remembered=None
        )
        if not self.bank.families(self.split):
            raise ValueError(
                f"agent.evaluate.split is {self.split!r}, of which agent.sources have no questions, and "
                "agent.families is empty"
            )

    def names(self, each: int, *, with_plan: bool = False) -> list[tuple[str, int]]:
        """Return (family, index) of `each` questions of every family, or as many as there are about pictures;
        families take turns, so that a batch has some of each. with_plan: only those whose shortest plan is
        known."""
        families = [
            family for family in self.bank.families(self.split) if not (with_plan and is_question_set(family))
        ]
        return [
            (family, index)
            for index in range(each)
            for family in families
            if index < self.bank.at_most(each, family, self.split)
        ]

    def question(self, family: str, index: int) -> Question:
        return self.bank.question(family, self.split, index)


def ceiling(cfg: Config, path: Path, device: torch.device, *, cota: Path) -> dict[str, float]:
    """Return the figures of the shortest plans."""
    settings = cfg.agent.evaluate
    model = base_of(cfg, path, device=device, dtype=inference_dtype(device))
    with toolbox_of(cfg, model) as toolbox:
        held_out = HeldOut(cfg, toolbox, cota)

        def made(names: Sequence[tuple[str, int]]) -> list[Outcome]:
            questions = [held_out.question(*name) for name in names]
            return [
                without_frames(outcome_of_episode(question, oracle(question, toolbox)))
                for question in questions
            ]

        return metrics(
            dist.by_turns(held_out.names(settings.each, with_plan=True), 1, made, desc="shortest plans")
        )


def without_frames(outcome: Outcome) -> Outcome:
    """Return what figures need. It is sent to the other processes, and the frames of a clip have 700 KB."""
    return replace(outcome, question=replace(outcome.question, frames=()))


def _of_policy(cfg: Config, policy: AgentPolicy, row: str, out: Path, *, cota: Path) -> dict[str, float]:
    settings, episode = cfg.agent.evaluate, cfg.agent.episode
    with toolbox_of(cfg, policy.model, adapters_off=policy.base) as toolbox:
        lists_operations = episode.operations_told and row != "direct"
        ask = _Asking(
            cfg=cfg,
            policy=policy,
            toolbox=toolbox,
            held_out=HeldOut(cfg, toolbox, cota),
            lists_operations=lists_operations,
        )
        outcomes, played = ask.about(ask.held_out.names(settings.each), forbid_calls=row == "direct")
        figures = metrics(outcomes)
        shown = [outcomes[place] for place in chosen(outcomes, each=settings.shown)]
        episodes = {number: played.get(outcome.question.question_id) for number, outcome in enumerate(shown)}
        entries = dist.union(
            {
                number: album_entry(number, shown[number], one)
                for number, one in episodes.items()
                if one is not None
            }
        )
        if dist.rank() == 0:
            write_album(out / "episodes", [entries[number] for number in range(len(shown))])
        if settings.controls and row != "direct":
            some = ask.held_out.names(min(settings.control_each, settings.each))
            for name in CONTROLS:
                figures |= {f"{name}/{key}": value for key, value in metrics(ask.under(name, some)).items()}
    return figures


@dataclass(frozen=True, kw_only=True)
class _Asking:
    """One policy, asked greedily."""

    cfg: Config
    policy: AgentPolicy
    toolbox: Toolbox
    held_out: HeldOut
    lists_operations: bool

    def under(self, control: str, names: Sequence[tuple[str, int]]) -> list[Outcome]:
        match control:
            case "forbidden":
                return self.about(names, answers_alone=True, desc=control)[0]
            case "random":
                make = partial(controls.RandomCalls, seed=self.cfg.seed)
                policy = self.policy
                with toolbox_of(self.cfg, policy.model, adapters_off=policy.base, make=make) as elsewhere:
                    return self.about(names, toolbox=elsewhere, desc=control)[0]
            case "shuffled":
                families = dict.fromkeys(family for family, _ in names)
                return [
                    o
                    for family in families
                    for o in self.about(
                        [n for n in names if n[0] == family],
                        change=controls.shuffled,
                        desc=f"{control} {family}",
                    )[0]
                ]
            case "blank":
                return self.about(names, change=controls.blank, desc=control)[0]
        planned = [name for name in names if not (is_question_set(name[0]) or name[0] in TELLING_PLANS)]
        return self.about(planned, plan=True, desc=control)[0]

    def about(
        self,
        names: Sequence[tuple[str, int]],
        *,
        forbid_calls: bool = False,
        answers_alone: bool = False,
        toolbox: Toolbox | None = None,
        change: Change | None = None,
        plan: bool = False,
        desc: str = "questions",
    ) -> tuple[list[Outcome], dict[str, PlayedEpisode]]:
        """Return the outcomes of all questions, without frames, and the episodes that this process played, by
        question_id."""
        episode, used = self.cfg.agent.episode, toolbox or self.toolbox
        operations = operations_told(used, self.lists_operations)
        openers = tokens.call_openers(self.policy.model) if forbid_calls else ()
        episodes: dict[str, PlayedEpisode] = {}

        def made(batch: Sequence[tuple[str, int]]) -> list[Outcome]:
            questions = [self.held_out.question(*name) for name in batch]
            plans = [[call_text(call) for call in question.plan] for question in questions] if plan else None
            forbidden: Sequence[int] = openers
            if answers_alone:
                allowed = [text for question in questions for text in (question.answer, *question.choices)]
                forbidden = tokens.all_but(self.policy.model, allowed)
            played = play(
                self.policy.model,
                used,
                [request_of(question, operations) for question in questions],
                limits=episode,
                forbidden=forbidden,
                plans=plans,
                change=change,
            )
            outcomes = []
            for question, rollout in zip(questions, played, strict=True):
                episodes[question.question_id] = rollout
                outcomes.append(without_frames(outcome_of(question, rollout)))
            return outcomes

        return dist.by_turns(names, episode.batch, made, desc=desc), episodes


def referring(cfg: Config, policy: AgentPolicy, prepared: Path) -> dict[str, float]:
    """Return gIoU over all samples with the agent's adapter, and with the base alone; nothing where there are
    no samples."""
    settings, benchmark = cfg.agent.evaluate, BENCHMARKS["referring"]
    held = (
        s for source in data.sources(prepared, settings.split, ["referring", "extra"]) for s in source.samples
    )
    single = (s for s in held if s.task == "referring" and len(s.frames) == 1)
    samples: list[Sample] = list(islice(single, settings.referring))
    if not samples:
        return {}

    ask = on_all_processes(
        partial(predict, policy.model, max_tokens=cfg.evaluate.max_tokens), cfg.evaluate.batch
    )

    def score() -> float:
        return benchmark.of_samples(samples, ask([benchmark.request(sample) for sample in samples])).metrics[
            "gIoU_all"
        ]

    tuned = score()
    with policy.base():
        base = score()
    return {"referring/gIoU_all": tuned, "referring/gIoU_all_base": base}
