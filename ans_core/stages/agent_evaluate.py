"""agent_evaluate: an agent and held-out questions in; figures by family, controls, and episodes turn by turn out.

    dvc repro agent/dvc.yaml:agent_evaluate@sft

`row` is direct (taught to answer at once), oracle (the shortest plans on the real operations: the ceiling), sft or rft.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ans_core import data
from ans_core.agent import controls, tokens
from ans_core.agent.album import chosen, write_album
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import Outcome, held_out, metrics, operations_told, outcome_of, request_of
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import Change, Limits, PlayedEpisode, play
from ans_core.agent.policy import AgentPolicy, load_base, load_policy
from ans_core.agent.protocol import call_text
from ans_core.agent.world import Question, oracle
from ans_core.benchmarks import BENCHMARKS
from ans_core.config import Config
from ans_core.model.predict import predict
from ans_core.stages.launch import machine_of
from ans_core.types import Log, Sample

POLICIES = {"direct": "agent/sft/direct", "sft": "agent/sft/tools", "rft": "agent/rft"}
"""Row -> the input folder of its adapter."""
CONTROLS = ("forbidden", "random", "shuffled", "blank", "plan")
"""What rows that call are also asked under: no calls; calls at random places; observations of other questions; blank ones; the shortest
plan given, so that only the answer is the model's."""


def run(cfg: Config, *, row: str, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: data, model, the row's adapter. Writes metrics.json, and episodes.json with pictures in `episodes`."""
    settings, path = cfg.agent.evaluate, Path(cfg.agent.base or inputs["model"])
    device = machine_of(cfg.launch).device
    if row == "oracle":
        found = ceiling(cfg, path, device)
    else:
        policy = load_policy(path, inputs[POLICIES[row]], operations=OPERATIONS, device=device)
        found = _of_policy(cfg, policy, row, out)
        if settings.referring and row != "direct":
            found |= referring(cfg, policy, inputs["data"])
    (out / "metrics.json").write_text(json.dumps(found, indent=1, sort_keys=True))
    log({f"{row}/{name}": value for name, value in found.items()}, 0)
    return found


def ceiling(cfg: Config, path: Path, device: torch.device) -> dict[str, float]:
    """Return the figures of the shortest plans."""
    settings = cfg.agent.evaluate
    model = load_base(path, operations=OPERATIONS, device=device, tiles=cfg.agent.tiles)
    with Toolbox(model, seconds=cfg.agent.episode.time_limit_s) as toolbox:
        questions = held_out(cfg.agent.families, each=settings.each, split=settings.split, seed=cfg.seed, tile=toolbox.tile)
        outcomes = []
        for question in questions:
            ran = oracle(question, toolbox)
            counts = ran.episode.counts
            outcomes.append(
                Outcome(
                    question=question, answer=ran.answer, right=ran.right, used=counts["ok"] > 0, evidence=ran.evidence,
                    calls=counts["calls"], valid_calls=counts["ok"],
                )
            )  # fmt: skip
    return metrics(outcomes)


def _of_policy(cfg: Config, policy: AgentPolicy, row: str, out: Path) -> dict[str, float]:
    settings, episode = cfg.agent.evaluate, cfg.agent.episode
    with Toolbox(policy.model, adapters_off=policy.base, seconds=episode.time_limit_s) as toolbox:
        ask = _Asking(cfg=cfg, policy=policy, toolbox=toolbox, told=episode.operations_told and row != "direct")
        questions = held_out(cfg.agent.families, each=settings.each, split=settings.split, seed=cfg.seed, tile=toolbox.tile)
        outcomes, played = ask.about(questions, forbid_calls=row == "direct")
        found = metrics(outcomes)
        places = chosen(outcomes, each=settings.shown)
        write_album(out / "episodes", [(outcomes[i], played[i]) for i in places])
        if settings.controls and row != "direct":
            some = questions[: settings.control_each * len(cfg.agent.families)]
            for name in CONTROLS:
                found |= {f"{name}/{key}": value for key, value in metrics(ask.under(name, some)).items()}
    return found


@dataclass(frozen=True, kw_only=True)
class _Asking:
    """One policy, asked greedily."""

    cfg: Config
    policy: AgentPolicy
    toolbox: Toolbox
    told: bool

    def under(self, control: str, questions: Sequence[Question]) -> list[Outcome]:
        match control:
            case "forbidden":
                return self.about(questions, forbid_calls=True)[0]
            case "random":
                seconds = self.cfg.agent.episode.time_limit_s
                with controls.RandomCalls(
                    self.policy.model, seed=self.cfg.seed, adapters_off=self.policy.base, seconds=seconds
                ) as elsewhere:
                    return self.about(questions, toolbox=elsewhere)[0]
            case "shuffled":
                return self.about(questions, change=controls.shuffled)[0]
            case "blank":
                return self.about(questions, change=controls.blank)[0]
        return self.about(questions, plans=[[call_text(call) for call in question.plan] for question in questions])[0]

    def about(
        self,
        questions: Sequence[Question],
        *,
        forbid_calls: bool = False,
        toolbox: Toolbox | None = None,
        change: Change | None = None,
        plans: Sequence[Sequence[str]] | None = None,
    ) -> tuple[list[Outcome], list[PlayedEpisode]]:
        episode, toolbox = self.cfg.agent.episode, toolbox or self.toolbox
        told = operations_told(toolbox, self.told)
        played = play(
            self.policy.model,
            toolbox,
            [request_of(question, told) for question in questions],
            limits=Limits.of(episode),
            forbidden=tokens.call_openers(self.policy.model) if forbid_calls else (),
            plans=plans,
            change=change,
            batch=episode.batch,
        )
        return [outcome_of(question, own) for question, own in zip(questions, played, strict=True)], played


def referring(cfg: Config, policy: AgentPolicy, prepared: Path) -> dict[str, float]:
    """Return gIoU over all samples with the agent's adapter, and with the base alone; nothing where there are no samples."""
    settings, benchmark = cfg.agent.evaluate, BENCHMARKS["referring"]
    held = [s for source in data.sources(prepared, settings.split, ["referring", "extra"]) for s in source.samples]
    samples: list[Sample] = [s for s in held if s.task == "referring" and len(s.frames) == 1][: settings.referring]
    if not samples:
        return {}

    def score() -> float:
        requests = [benchmark.request(sample) for sample in samples]
        answers = predict(policy.model, requests, max_tokens=cfg.evaluate.max_tokens, batch=cfg.evaluate.batch)
        return benchmark.score(samples, answers).metrics["gIoU_all"]

    own = score()
    with policy.base():
        base = score()
    return {"referring/gIoU_all": own, "referring/gIoU_all_base": base}
