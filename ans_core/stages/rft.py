"""rft: the agent after SFT and questions in; its adapter after reinforcement learning on whole episodes
out.

    dvc repro agent/dvc.yaml:rft

Policy, teacher and reference are three adapters over the frozen base, on which operations run. Drawn questions
lie behind those of `cota`, so none was seen before; those about annotated pictures begin behind them, too, and
again from the first where there are no more. Several processes share a step's questions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ans_core import dist
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import operations_told, request_of
from ans_core.agent.ocr import check_reader
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.policy import AgentPolicy, load_policy
from ans_core.agent.practice import AgentPractice, boundary_name, sample_of, save_weights
from ans_core.agent.rewards.curriculum import PHASES
from ans_core.agent.world import Question
from ans_core.agent.world.bank import QuestionBank, divided, picture_share
from ans_core.checkpoints import checkpoint
from ans_core.config import Config, Rl
from ans_core.model.checkpointing import layers_again
from ans_core.model.network import Network
from ans_core.model.parts import check_moved, hashes, part_of
from ans_core.rl.batch import rl_batch
from ans_core.rl.dual_loop import Batches, DualLoop, check_learned
from ans_core.stages.launch import last_means, machine_of, schedule_of, weights_dtype, write_records
from ans_core.stages.operations import LOOP, rl_of_episodes, toolbox_of
from ans_core.train import loop
from ans_core.train.watch import Watch
from ans_core.types import Log

ADAPTERS = ("policy", "teacher", "reference")
"""All begin as the agent's SFT; the first is trained, the second its moving average, the last stays."""


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: model, agent/cota, agent/sft/tools. Writes the policy's tensors (delta), `boundaries`
    (policy and teacher at the end of each phase of the rewards), curves.csv, rewards.json, moved.json and
    `samples` (episodes with their rewards)."""
    check_reader(cfg.agent.reader)
    settings = cfg.agent.rft
    settings.check_shares(processes=dist.world_size())
    # an adapter's optimizer is small
    machine = replace(machine_of(cfg.launch, settings.dtype, log=log), deepspeed_stage=0)
    base = inputs["model"]
    policy = load_policy(
        base, inputs["agent/sft/tools"], operations=OPERATIONS, device=machine.device, names=ADAPTERS,
        dtype=weights_dtype(machine.dtype), reader=cfg.agent.reader,
    )  # fmt: skip
    policy.model.checkpointing = layers_again(settings.checkpointing)
    boundaries = scratch / "boundaries"
    with toolbox_of(cfg, policy.model, adapters_off=policy.base) as toolbox:
        bank = QuestionBank.of_cota(
            cfg.agent.families, inputs["agent/cota"], seed=cfg.seed, tile=toolbox.tile
        )
        questions = Questions(cfg, bank)
        practice = practice_of(cfg, policy, toolbox, questions)
        module = DualLoop(
            policy.adapters,
            grpo_settings(cfg),
            seed=cfg.seed,
            points=0,
            loss_weights=(0.0, 0.0),
            rewards={},
            practice=practice,
            log=log,
            pictures_to=scratch / "samples",
        )
        before = hashes(policy.model)  # with the head in fp32

        def after_step(step: int) -> dict[str, float]:
            metrics = module.after_step(step)
            practice.change_phase(step, policy.adapters, boundaries)
            return metrics

        curves = loop.train(
            module, partial(questions.batch, policy.model), name="rft",
            schedule=schedule_of(settings.optim, inner_steps=settings.inner_steps), machine=machine,
            seed=cfg.seed, scratch=scratch, log=log, after_step=after_step, watch=Watch(part_of=part_of),
        )  # fmt: skip
    check_learned(curves)
    save_weights(boundaries / boundary_name(practice.curriculum.phase, settings.optim.steps), policy.adapters)
    moved = check_moved(before, policy.model)
    if dist.rank() == 0:
        base_hash = checkpoint.weights_hash(base)
        policy.operations_told, policy.ocr = cfg.agent.episode.operations_told, cfg.agent.reader
        policy.save(out, base_hash=base_hash, about={"stage": "rft", "seed": cfg.seed})
        keep_boundaries(boundaries, out / "boundaries")
        write_records(out, scratch, {"rft": curves}, moved)
        (out / "rewards.json").write_text(json.dumps(module.record))
    dist.wait_for_all()
    return last_means(curves)


def practice_of(cfg: Config, policy: AgentPolicy, toolbox: Toolbox, questions: Questions) -> AgentPractice:
    episode = cfg.agent.episode
    operations = operations_told(toolbox, episode.operations_told)
    return AgentPractice(
        policy.model,
        toolbox,
        question=questions.named,
        ask=lambda question: request_of(question, operations),
        families=questions.bank.families("train"),
        limits=episode,
        settings=cfg.agent.rft,
    )


def grpo_settings(cfg: Config) -> Rl:
    """Return the settings of RL's steps: those that are the same for every loop."""
    shared = cfg.agent.rft.model_dump(include=Rl.model_fields.keys() - {"optim"})
    return rl_of_episodes(cfg, cfg.agent.rft.optim, **shared)


class Questions:
    """Training questions, families in turn, some more often; decided by (seed, number) alone."""

    def __init__(self, cfg: Config, bank: QuestionBank) -> None:
        self.bank, self.settings = bank, cfg.agent.rft
        self.drawn = turn_of(bank.drawn, cfg.agent.rft.often)
        self.of_pictures = turn_of(bank.of_pictures("train"), {})
        self.share = picture_share(
            cfg.agent.source_share, pictures=bool(self.of_pictures), others=bool(self.drawn)
        )
        self.first = cfg.agent.cota.questions
        """Index of a family's first question: those before it are in the traces."""
        self.named = partial(bank.named, split="train")

    def number(self, number: int) -> Question:
        """Return question `number` of the run."""
        about_picture, number = divided(number, self.share)
        turn = self.of_pictures if about_picture else self.drawn
        turns, place = divmod(number, len(turn))
        name = turn[place]
        index = turns * turn.count(name) + turn[:place].count(name)
        return self.named(self.bank.id_of(name, "train", self.first(name) + index))

    def batch(self, model: Network, step: int, micro: int) -> Batches:
        """Return this process's questions of a step's micro-batch."""
        s = self.settings
        rollout, inner = divmod(step, s.inner_steps)
        numbers = range(rollout * s.optim.batch, (rollout + 1) * s.optim.batch)
        chosen = [self.number(n) for n in dist.own_share(numbers, micro=micro, micros=s.optim.accumulate)]
        batch = rl_batch([sample_of(q) for q in chosen], [q.text for q in chosen], model, mask_size=1)
        return Batches(
            batches=[batch], of={LOOP: 0}, learned=len(chosen), rollout=rollout, micro=micro, inner=inner,
            step=step
        )  # fmt: skip


def turn_of(families: Sequence[str], often: Mapping[str, int]) -> list[str]:
    """Return one turn: every family as often as wanted, its questions spread over the turn."""
    places = [
        ((i + 0.5) / often.get(family, 1), family) for family in families for i in range(often.get(family, 1))
    ]
    return [family for _, family in sorted(places, key=lambda place: place[0])]


def keep_boundaries(folder: Path, out: Path) -> None:
    """Copy the weights with which each phase ended last."""
    for phase in PHASES:
        files: Sequence[Path] = sorted(folder.glob(f"{phase}-*.safetensors"))
        if files:
            out.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files[-1], out / f"{phase}.safetensors")
