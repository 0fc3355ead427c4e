"""One RL step: samples -> the loss of all loops, with rollouts, rewards, teacher and reference in between.

First every loop acts (policy and inverse model), then the reference reads the rollouts, then the policy
learns from them in `inner_steps` updates. The first of these updates is on-policy: its ratio is 1. The frozen
encoders run once per picture for all of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ans_core.config.rl import Rl
from ans_core.data.collate import Batch
from ans_core.data.tensor_batch import TensorBatch
from ans_core.dist import largest, rank, shared_sum, world_size
from ans_core.judge.judging import Judging
from ans_core.model.adapters import Adapters
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.supervised import Supervised
from ans_core.pictures import transforms
from ans_core.rewards import Reward
from ans_core.rl import (
    agent_loop,
    caption_loop,
    describe_loop,
    ground_loop,
    grpo,
    mask_loop,
    pictures,
    refer_loop,
    vqa_loop,
)
from ans_core.rl.batch import EncodedImages, RlBatch
from ans_core.rl.experience import Experience
from ans_core.rl.mask_policy import GridGaussian, steered
from ans_core.rl.practice import Practice
from ans_core.rl.rollout import Reader, exact_head
from ans_core.rl.step import Exploration, Loop, RolloutStep, StepTimer
from ans_core.train.states import Curves
from ans_core.train.watch import peak_memory_mb
from ans_core.types import Log

LOOPS: dict[str, Loop] = {
    "caption": caption_loop.LOOP,
    "mask": mask_loop.LOOP,
    "refer": refer_loop.LOOP,
    "ground": ground_loop.LOOP,
    "describe": describe_loop.LOOP,
    "vqa": vqa_loop.LOOP,
    "agent": agent_loop.LOOP,
}


@dataclass(frozen=True, kw_only=True)
class Batches(TensorBatch):
    """The samples that all loops need for one step."""

    batches: list[RlBatch]
    of: Mapping[str, int]
    """Loop -> index of its batch; loops that take the same samples share one."""
    learned: int
    """Number of samples of each batch to learn from; the batch may hold more candidates (`rl.oversample`)."""
    rollout: int
    """Number of the rollout that this step learns from; seeds use it."""
    micro: int
    inner: int
    """Index of the update on the same rollouts."""
    step: int
    rows: Batch | None = None
    """This micro-batch's rows of SFT's mixture (`rl.rows`)."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What is learned from SFT's rows beside the loops. (In a class of its own, for a module in the module
    would be saved with it.)"""

    supervised: Supervised


class DualLoop(nn.Module):
    """The loss module of the RL stage.

    Its extra state is saved with every training state: teacher, exploration, rewards so far (of the first
    process's samples), and rollouts that are still to be learned from.
    """

    def __init__(
        self,
        policies: Adapters,
        settings: Rl,
        *,
        seed: int,
        points: int,
        loss_weights: tuple[float, float],
        rewards: Mapping[str, Reward],
        judging: Judging | None = None,
        practice: Practice | None = None,
        beside: Beside | None = None,
        log: Log | None = None,
        pictures_to: Path | None = None,
    ) -> None:
        super().__init__()
        self.model = policies.model
        self.policies, self.settings, self.seed, self.points, self.loss_weights = (
            policies,
            settings,
            seed,
            points,
            loss_weights,
        )
        self.rewards, self.judging, self.practice, self.log, self.pictures_to = (
            rewards,
            judging,
            practice,
            log,
            pictures_to,
        )
        self.beside = beside
        self.reader = Reader(
            temperature=settings.temperature,
            forbidden=[self.model.image_token_id],
            guard=settings.logit_guard,
        )
        self.mask_policy = GridGaussian(settings.mask_grid)
        self.exploration = Exploration(width=settings.mask_sigma)
        self.record: dict[str, list[list[float]]] = defaultdict(list)
        """Reward part -> the values of every rollout step, for the report."""
        self.updates = 0
        self.waiting: dict[int, dict[str, Experience]] = {}
        """Micro-batch -> loop -> what is still to be learned from."""
        self.acted: dict[int, dict[str, RolloutStep]] = {}
        """Micro-batch -> loop -> the pictures that it was done with, encoded, from `begin_step` to
        `forward`."""
        self.timer = StepTimer()
        self.alike: list[float] = []
        """Mean overlap of a group's masks, by micro-batch of this step that rolled out."""
        self.identical: list[float] = []
        """Share of groups with one mask only, by micro-batch."""
        exact_head(self.model)

    # State

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "teacher": self.policies.tensors("teacher"),
            "exploration": dict(vars(self.exploration)),
            "updates": self.updates,
            "nonfinite": self.reader.nonfinite,
            "record": dict(self.record),
            "practice": None if self.practice is None else self.practice.state(),
            "waiting": {
                micro: {name: done.state() for name, done in loops.items()}
                for micro, loops in self.waiting.items()
            },
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.policies.load("teacher", state["teacher"])
        self.exploration, self.updates = Exploration(**state["exploration"]), state["updates"]
        self.reader.nonfinite = state["nonfinite"]
        self.record = defaultdict(list, state["record"])
        if self.practice is not None:
            self.practice.load(state["practice"])
        self.waiting = {
            m: {name: Experience.of(s) for name, s in loops.items()} for m, loops in state["waiting"].items()
        }

    def after_step(self, step: int) -> dict[str, float]:
        """Move the teacher towards the policy; called after real steps only. Raises RuntimeError when the run
        can't learn any more."""
        self.updates += 1
        s = self.settings
        self.timer.stop("update")
        self.timer.stop("step")
        if self.alike:
            self.exploration.width = steered(self.exploration.width, fmean(self.alike))
        if self.identical:
            self.exploration.identical = self.exploration.identical + 1 if min(self.identical) == 1 else 0
        decay = min(s.ema, (1 + self.updates) / (10 + self.updates)) if s.ema_warmup else s.ema
        metrics = {
            "teacher_distance": self.policies.ema(decay),
            "nonfinite_logits": float(self.reader.nonfinite),
        }
        metrics |= {} if self.practice is None else self.practice.metrics()
        if self.log is not None and rank() == 0:
            spent = self.timer.metrics()
            self.log(
                {**spent, **self._judge_stats(), "rl/peak_memory_mb": peak_memory_mb(self.model.device)}, step
            )
        if s.stop_identical and self.exploration.identical >= s.stop_identical:
            raise RuntimeError(
                f"rl: in {self.exploration.identical} updates in a row every group of loop 2 had one mask "
                f"only, so it has no gradient; the width of its noise is {self.exploration.width:.3g}: raise "
                "rl.mask_sigma"
            )
        return metrics

    def _judge_stats(self) -> dict[str, float]:
        return (
            {}
            if self.judging is None
            else {f"rl/judge/{name}": value for name, value in self.judging.judge.stats().items()}
        )

    # A step

    def begin_step(self, batches: Sequence[Batches]) -> list[Batches]:
        """Act in all micro-batches of a step before the policy learns from the first of them: advantages and
        losses are computed over all of them."""
        self._forget_step()  # a skipped step ends without `after_step`
        self.timer.start("step")
        moved = [batch.to(self.model.device) for batch in batches]
        if moved[0].inner == 0:
            for some in grouped(moved, self.settings, self.model.device):
                self._act(some)
            self._set_advantages(moved)
            if self.practice is not None:
                self.practice.end_rollouts(partial(shared_sum, device=self.model.device))
        else:
            for batch in moved:
                self.acted[batch.micro] = self._goes_on(batch)
        self._set_totals(moved)
        if self.beside is None:
            return moved
        rows = self.beside.supervised.begin_step([batch.rows for batch in moved if batch.rows is not None])
        return [replace(batch, rows=own) for batch, own in zip(moved, rows, strict=True)]

    def _set_advantages(self, batches: Sequence[Batches]) -> None:
        """Compute advantages from the rewards of all micro-batches and processes."""
        s = self.settings
        for name in s.loops:
            own = [self.waiting[batch.micro][name] for batch in batches]
            advantage = grpo.advantages_of_parts(
                {part: torch.cat([done.rewards[part] for done in own]) for part in own[0].rewards},
                LOOPS[name].rewards(s),
                combine=s.combine_rewards,
                scale=s.scale_rewards,
                std_floor=s.std_floor,
                total=partial(shared_sum, device=self.model.device),
            )
            for done, part in zip(own, advantage.split([len(done.groups) for done in own]), strict=True):
                done.advantage = part
            if self.pictures_to is not None and self._is_shown(batches[0]):
                first = batches[0]
                pictures.save(
                    self.pictures_to,
                    f"{first.rollout:06d}-{LOOPS[name].prefix}",
                    self.acted[first.micro][name],
                    own[0],
                )

    def _set_totals(self, batches: Sequence[Batches]) -> None:
        """Give every loop's step the counts over all micro-batches and processes."""
        names = list(self.settings.loops)
        counts = torch.zeros(len(names), 3, dtype=torch.float64)
        for row, name in enumerate(names):
            for done in (self.waiting[batch.micro][name] for batch in batches):
                counts[row] += torch.tensor(
                    [len(done.groups), len(done.groups) * self.settings.group, done.learned_tokens()]
                )
        micro_batches = float(len(batches) * world_size())
        for name, (samples, answers, tokens) in zip(
            names, shared_sum(counts, self.model.device).tolist(), strict=True
        ):
            totals = grpo.Totals(samples=samples, answers=answers, tokens=tokens, micro_batches=micro_batches)
            for batch in batches:
                self.acted[batch.micro][name] = replace(self.acted[batch.micro][name], totals=totals)

    def forward(self, batch: Batches) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """Return this micro-batch's part of the step's loss, from what `begin_step` did.

        The timer's part `update` ends with the next micro-batch or after the step, so it includes the
        backward pass and the optimizer.
        """
        s = self.settings
        self.timer.stop("update")
        steps, done = self.acted.pop(batch.micro), self.waiting.pop(batch.micro)
        total = batch.batches[0].pixels.new_zeros(())
        found: dict[str, float] = {}
        self.timer.start("update")
        for name, weight in s.loops.items():
            loss, metrics = LOOPS[name].learn(steps[name], done[name])
            total = total + weight * loss
            # the mean of all parts of the step is its loss
            metrics["loss"] = float(loss.detach()) * steps[name].totals.micro_batches
            found |= {
                f"{LOOPS[name].prefix}/{key}": value for key, value in (done[name].metrics | metrics).items()
            }
        if self.beside is not None and batch.rows is not None:
            loss, metrics = self.beside.supervised(batch.rows)
            decoder = (
                p.sum()
                for name, p in self.policies.parameters("policy").items()
                if ".sam_mask_decoder." in f".{name}."
            )
            # no loss may read its scores, as in mask_loop
            total = total + s.rows_weight * loss + 0.0 * sum(decoder)
            found |= {f"rows/{key}": value for key, value in metrics.items()}
        for experience in done.values():
            if "identical" in experience.metrics:
                self.identical.append(experience.metrics["identical"])
                if batch.inner == 0:
                    self.alike.append(experience.metrics["group_pairwise_iou"])
        if batch.inner + 1 < s.inner_steps:
            self.waiting[batch.micro] = done
        if total.requires_grad:
            total.register_hook(self._check_active)
        return total, found

    def _forget_step(self) -> None:
        self.acted.clear()
        self.timer.clear()
        self.alike.clear()
        self.identical.clear()

    def _check_active(self, gradient: Tensor) -> None:
        """Assert that the policy's adapter is active. With gradient checkpointing, layers run again in the
        backward pass: under another adapter the policy would get no gradient."""
        assert self.policies.active == "policy", (
            f"backward with the adapter {self.policies.active!r} active; only the policy learns"
        )

    def _rollout_steps(self, batch: Batches) -> dict[str, RolloutStep]:
        with_masks = {batch.of[name] for name in self.settings.loops if LOOPS[name].decodes_masks}
        encoded = [self.encode(b, masks=i in with_masks) for i, b in enumerate(batch.batches)]
        return {
            name: self.rollout_step(
                name, batch.batches[batch.of[name]], encoded[batch.of[name]], rollout=batch.rollout
            )
            for name in self.settings.loops
        }

    def encode(self, batch: RlBatch, *, masks: bool) -> EncodedImages:
        """Encode the samples' pictures; for SAM2 only where a loop draws in them (`masks`)."""
        with torch.no_grad(), self.timer.part("encode"):
            return EncodedImages(
                vision=self._looked_at(batch), frames=self.model.sam2.encode(batch.pixels) if masks else None
            )

    def rollout_step(
        self, name: str, batch: RlBatch, encoded: EncodedImages, *, rollout: int = 0
    ) -> RolloutStep:
        """Return what a loop needs to act on these samples. rollout: its number, for the seeds."""
        return RolloutStep(
            policies=self.policies,
            settings=self.settings,
            reader=self.reader,
            batch=batch,
            encoded=encoded,
            rewards=self.rewards,
            mask_policy=self.mask_policy,
            exploration=self.exploration,
            mask_points=self.points,
            mask_losses=self.loss_weights,
            seeds=(self.seed, name, rollout),
            timer=self.timer,
            practice=self.practice,
        )

    def _looked_at(self, batch: RlBatch) -> list[ImageFeatures]:
        """Return the vision tower's features of every sample's picture, or pictures. What a practice shows of
        it, the practice says: it enlarges small ones."""
        if self.practice is None:
            return self.model.vision_features(batch.views).split(batch.views)
        shown = [tuple(s.frames) if s.stills else (s.frames[0],) for s in batch.samples]
        parts = [(frame, (0, 0, *transforms.image_size(frame))) for frames in shown for frame in frames]
        seen = iter(self.practice.encode(parts))
        return [ImageFeatures.joined([*islice(seen, len(frames))]) for frames in shown]

    def _goes_on(self, batch: Batches) -> dict[str, RolloutStep]:
        """Return the steps of a micro-batch whose rollouts are learned from once more."""
        steps, done = self._rollout_steps(batch), self.waiting.get(batch.micro)
        if done is None:
            raise RuntimeError(
                f"rl: step {batch.step} goes on with rollouts that are gone; start the stage anew"
            )
        for name in steps:
            candidates, kept = len(batch.batches[batch.of[name]].samples), done[name].kept
            if len(done[name].groups) != len(kept or range(candidates)) or max(kept or [0]) >= candidates:
                raise RuntimeError(
                    f"rl: the state before step {batch.step} was written between two updates of one rollout, by "
                    "another number of processes; go on with that number"
                )
        return {
            name: step if (kept := done[name].kept) is None else step.take(kept)
            for name, step in steps.items()
        }

    @torch.no_grad()
    def _act(self, batches: Sequence[Batches]) -> None:
        """Roll out and reward micro-batches, each loop all of them at once, and let the reference read the
        rollouts.

        While a judge reads captions, the other loops act and the reference reads. If there are more
        candidates than are learned from, those whose rewards vary most are kept, and the reference reads only
        the kept ones.
        """
        for batch in batches:
            self.acted[batch.micro], self.waiting[batch.micro] = self._rollout_steps(batch), {}
        judged: dict[tuple[int, str], Future[list[float | None]]] = {}
        for name in self.settings.loops:
            steps = [self.acted[batch.micro][name] for batch in batches]
            if LOOPS[name].acts_together:
                experiences = (
                    LOOPS[name]
                    .act(RolloutStep.joined(steps))
                    .parts([len(step.batch.samples) for step in steps])
                )
            else:
                experiences = [LOOPS[name].act(step) for step in steps]
            for batch, step, done in zip(batches, steps, experiences, strict=True):
                self.waiting[batch.micro][name] = done
                if self.judging is not None and LOOPS[name].judged(self.settings):
                    judged[batch.micro, name] = self.judging.submit(step.batch.samples, done.texts)
        for batch in batches:
            self._reward(batch, {name: judged.get((batch.micro, name)) for name in self.settings.loops})

    def _reward(self, batch: Batches, judged: Mapping[str, Future[list[float | None]] | None]) -> None:
        """Reward what a micro-batch's loops did, keep what is learned from, and let the reference read it."""
        steps, done = self.acted[batch.micro], self.waiting[batch.micro]
        choose = any(len(step.batch.samples) > batch.learned for step in steps.values())
        if not choose:
            self._read_reference(steps, done)
        for name, experience in done.items():
            self._record_rewards(name, experience, judged[name])
            if choose:
                kept = grpo.most_telling(self._total_reward(name, experience), batch.learned).tolist()
                done[name], steps[name] = experience.take(kept), steps[name].take(kept)
        if choose:
            self._read_reference(steps, done)

    def _read_reference(self, steps: Mapping[str, RolloutStep], done: Mapping[str, Experience]) -> None:
        with self.timer.part("reference"), self.policies.using("reference"):
            for name, experience in done.items():
                LOOPS[name].read_reference(steps[name], experience)

    def _total_reward(self, name: str, experience: Experience) -> Float[Tensor, "B G"]:
        return grpo.weighted_sum(experience.rewards, LOOPS[name].rewards(self.settings))

    def _record_rewards(
        self, name: str, experience: Experience, judged: Future[list[float | None]] | None
    ) -> None:
        """Add the judgements to the rewards, and write the rewards to metrics and record."""
        if judged is not None:
            assert self.judging is not None, "judgements without a judge"
            with self.timer.part("judge"):
                experience.rewards["meteor"], metrics = self.judging.rewards_with_judge(
                    experience.rewards["meteor"], judged.result()
                )
            experience.metrics |= metrics
        prefix, rewards = LOOPS[name].prefix, self._total_reward(name, experience)
        for part, values in experience.rewards.items():
            known = values[~values.isnan()]
            if len(known):
                experience.metrics |= {
                    f"reward/{part}": float(known.mean()),
                    f"reward/{part}_std": float(known.std(correction=0)),
                }
            self.record[f"{prefix}/{part}"].append([round(float(v), 4) for v in known])
        known = rewards[~rewards.isnan()].double()
        summed, count = shared_sum(
            torch.tensor([float(known.sum()), float(len(known))]), self.model.device
        ).tolist()
        if len(known):
            experience.metrics["reward_std"] = float(known.std(correction=0))
        experience.metrics |= {
            "failed": 1 - len(known) / rewards.numel(),
            "zero_spread": grpo.zero_spread(rewards),
        }
        if count:  # else every rollout of every process failed: this step has no mean reward
            experience.metrics["reward"] = summed / count

    def _is_shown(self, batch: Batches) -> bool:
        every = self.settings.samples_every
        return bool(every) and batch.rollout % every == 0 and batch.micro == 0 and rank() == 0


def grouped(batches: Sequence[Batches], settings: Rl, device: torch.device) -> list[Sequence[Batches]]:
    """Group micro-batches that act together: with `rl.answers_at_once` answers of a loop at most, and one
    micro-batch at least. Processes whose shares differ group alike, because they wait for each other in every
    group. All of them must call it."""
    most = largest(max(len(own.samples) for batch in batches for own in batch.batches), device)
    count = max(1, settings.answers_at_once // (settings.group * most))
    return [batches[first : first + count] for first in range(0, len(batches), count)]


def check_learned(curves: Curves) -> None:
    """Raise RuntimeError if no step of a run had a gradient."""
    if not any(value for _, name, value in curves if name == "grad_norm"):
        raise RuntimeError(
            "RL learned nothing: in every step all answers of each group had the same reward (zero_spread "
            "is 1), so no step had a gradient. Take more steps, larger groups (`group`) or a higher "
            "temperature, or start from a model whose answers are right at times"
        )
