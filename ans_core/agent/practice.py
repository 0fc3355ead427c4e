"""Questions as an RL loop's practice: episodes on the real operations, their rewards, and what these
depend on from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ans_core.agent.crops import Crop, CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import looked
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.rewards.curiosity import ToolUse, bonus
from ans_core.agent.rewards.curriculum import PARTS, PHASES, Curriculum
from ans_core.agent.rewards.running import RunningNorm, moments
from ans_core.agent.rewards.total import episode_parts, shaping
from ans_core.agent.world import FAMILIES, Question, is_right
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.config.rft import Rft
from ans_core.dist import rank, wait_for_all
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.rl.batch import Box
from ans_core.rl.grpo import Total
from ans_core.rl.practice import PlayedRollout
from ans_core.rl.step import RolloutStep
from ans_core.types import ImageRef, Request, Sample

COLLAPSE_STEPS = 10
"""Steps over which calls are averaged before a run is stopped."""


@runtime_checkable
class Weights(Protocol):
    """The adapters that a roll-back restores (`ans_core.model.adapters.Adapters`)."""

    def tensors(self, adapter: str) -> dict[str, Tensor]: ...
    def load(self, adapter: str, tensors: dict[str, Tensor]) -> None: ...


class AgentPractice:
    """`ans_core.rl.practice.Practice` on questions."""

    def __init__(
        self,
        model: Network,
        toolbox: Toolbox,
        *,
        question: Callable[[str], Question],
        ask: Callable[[Question], Request],
        families: Sequence[str],
        limits: EpisodeSettings,
        settings: Rft,
    ) -> None:
        """question: id -> question. ask: as the model was taught to be asked. settings: weights of the
        shaping parts, and when phases change."""
        self.toolbox, self.question, self.ask, self.limits = toolbox, question, ask, limits
        self.settings = settings
        self.curious_steps = max(
            1, round(settings.curious_share * settings.optim.steps / settings.inner_steps)
        )
        self.features = CropFeatures(model)
        self.use = {family: ToolUse() for family in families}
        self.norm = RunningNorm()
        self.curriculum = Curriculum()
        self.looks: list[float] = []
        """Of the last steps: the share of episodes with a successful call, of those that need one."""
        self._needing = torch.zeros(2, dtype=torch.float64)
        """Of this step: such episodes with a call, all such."""
        self.steps = 0
        """Rollout steps so far."""
        self._counts = torch.zeros(len(families), 3, dtype=torch.float64)
        """Of this step: episodes with a successful call, episodes without, right ones."""
        self._coherences: list[float] = []

    # Episodes

    def play(self, step: RolloutStep) -> list[PlayedRollout]:
        questions = [self.question(sample.sample_id) for sample in step.batch.samples]
        requests = [self.ask(question) for question in questions]
        groups = play_groups(step, self.toolbox, requests, limits=self.limits, features=self.features)
        return [
            self._rewarded(question, episode)
            for question, group in zip(questions, groups, strict=True)
            for episode in group
        ]

    def encode(self, parts: Sequence[tuple[ImageRef, Box]]) -> list[ImageFeatures]:
        return self.features.of([Crop(frame=frame, box=box) for frame, box in parts])

    def _rewarded(self, question: Question, played: PlayedEpisode) -> PlayedRollout:
        right = played.answer is not None and is_right(played.answer, question)
        called, shortest = played.successful_calls > 0, question.wanted_calls
        earned, faults = episode_parts(question, played.episode, evidence=looked(question, played))
        curious = bonus(successful=played.successful_calls, shortest=shortest, use=self.use[question.family])
        parts = {
            "curiosity": self._curiosity() * curious + earned["price"],
            "evidence": earned["evidence"],
            "coherence": self.norm(earned["coherence"]),
            "penalty": earned["penalty"],
        }
        active = {name: getattr(self.settings, name) for name in PARTS[self.curriculum.phase]}
        rewards = {"task": float(right), "shaping": shaping(parts, active)}
        row = self._counts[list(self.use).index(question.family)]
        row += torch.tensor([called, not called, right], dtype=row.dtype)
        if question.plan:
            self._needing += torch.tensor([called, True])
        self._coherences.append(earned["coherence"])
        return rollout_of(
            played,
            rewards=rewards if played.is_lesson else dict.fromkeys(rewards, math.nan),
            measured=measured(question, played, right=right)
            | parts
            | {"coherence": earned["coherence"], **faults},
        )

    def _curiosity(self) -> float:
        return max(0.0, 1 - self.steps / self.curious_steps)

    # From step to step

    def end_rollouts(self, total: Total) -> None:
        counts, (episodes, summed, squares) = total(self._counts), total(moments(self._coherences)).tolist()
        for family, (with_call, without, _) in zip(self.use, counts.tolist(), strict=True):
            self.use[family] = self.use[family].after(ToolUse(with_call=with_call, without=without))
        self.norm = self.norm.after(episodes, summed, squares)
        accuracy = float(counts[:, 2].sum()) / max(episodes, 1.0)
        self.curriculum = self.curriculum.after(accuracy, summed / max(episodes, 1.0), self.settings.phases)
        self._watch_calls(*total(self._needing).tolist())
        self.steps += 1
        self._counts.zero_()
        self._needing.zero_()
        self._coherences.clear()

    def _watch_calls(self, with_call: float, needing: float) -> None:
        """Raise RuntimeError where the agent has unlearned to look (`least_calls`)."""
        if needing:
            self.looks = [*self.looks, with_call / needing][-COLLAPSE_STEPS:]
        if len(self.looks) == COLLAPSE_STEPS and (share := fmean(self.looks)) < self.settings.least_calls:
            raise RuntimeError(
                f"rft: in {share:.2f} of the episodes that need an operation one was called and worked, over the "
                f"last {COLLAPSE_STEPS} steps; agent.rft.least_calls is {self.settings.least_calls:g}. Raise "
                "agent.rft.curiosity or evidence, lower the learning rate, or teach more calls (agent.sft)"
            )

    def metrics(self) -> dict[str, float]:
        return {f"agent/{family}/running_RaPR": use.rapr for family, use in self.use.items()} | {
            "agent/phase": float(PHASES.index(self.curriculum.phase)),
            "agent/roll_backs": float(self.curriculum.roll_backs),
            "agent/curiosity_left": self._curiosity(),
        }

    def change_phase(self, step: int, weights: Weights, folder: Path) -> None:
        """Go on to the next phase, keeping the weights of the boundary in `folder`, or back to the one before
        with its weights."""
        move = self.curriculum.move(self.settings.phases)
        file = boundary_name(self.curriculum.phase, step + 1)
        if move == "advance":
            save_weights(folder / file, weights)
        elif move == "roll_back":
            assert self.curriculum.boundary is not None
            load_weights(folder / self.curriculum.boundary[0], weights)
        self.curriculum = self.curriculum.moved(move, file)

    def state(self) -> dict[str, Any]:
        return {
            "use": {family: dict(vars(use)) for family, use in self.use.items()},
            "norm": self.norm.steps,
            "curriculum": self.curriculum.state(),
            "steps": self.steps,
            "looks": self.looks,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.use = {family: ToolUse(**use) for family, use in state["use"].items()}
        self.norm, self.curriculum, self.steps = (
            RunningNorm(steps=state["norm"]),
            Curriculum(**state["curriculum"]),
            state["steps"],
        )
        self.looks = list(state["looks"])


def play_groups(
    step: RolloutStep,
    toolbox: Toolbox,
    requests: Sequence[Request],
    *,
    limits: EpisodeSettings,
    features: CropFeatures,
) -> list[list[PlayedEpisode]]:
    """Play the step's G episodes about each request, every one from a random stream of its own."""
    size = step.settings.group
    played = play(
        step.model,
        toolbox,
        [request for request in requests for _ in range(size)],
        limits=limits,
        reader=step.reader,
        seeds=[step.seed("episode", i, g) for i in range(len(requests)) for g in range(size)],
        features=features,
        precision=nullcontext,  # this is inside the training loop's own, in which episodes are learned
    )
    return [played[start : start + size] for start in range(0, len(played), size)]


def sample_of(question: Question) -> Sample:
    """Return the question as RL's batches hold it."""
    width, height = question.workspace().size(0)
    return Sample(
        sample_id=question.question_id,
        dataset="drawn world" if question.family in FAMILIES else "annotated pictures",
        image_id=question.question_id,
        frames=question.frames,
        stills=question.stills,
        height=height,
        width=width,
        task="conversation",
        text=question.answer,
        question=question.text,
    )


def rollout_of(
    played: PlayedEpisode, *, rewards: dict[str, float], measured: dict[str, float]
) -> PlayedRollout:
    """Return an episode as the loop learns from it, with the numbers that every practice measures."""
    return PlayedRollout(
        prefix=played.prefix,
        rollout=played.rollout,
        logps=played.logps,
        observed=observed(played),
        text=transcript(played),
        rewards=rewards,
        measured={
            "calls": float(len(played.episode.observations)),
            "RaPR": float(played.successful_calls > 0),
            "over_turn": float(played.over_turn),
            "length": float(len(played.logps)),
            **measured,
        },
    )


def observed(played: PlayedEpisode) -> tuple[tuple[int, Box], ...]:
    """Return what came back as parts of the sample's frames, in the order of the text."""
    names = [
        name for turn in played.turns if turn.shown is not None for name in turn.shown.observation.pictures
    ]
    handles = [played.episode.workspace.image(name) for name in names]
    return tuple((handle.frame, handle.box) for handle in handles)


def transcript(played: PlayedEpisode) -> str:
    """Return what was said and came back, a line each."""
    return "\n".join(
        line
        for turn in played.turns
        for line in (turn.text, *((f"> {turn.shown.text}",) if turn.shown else ()))
    )


def measured(question: Question, played: PlayedEpisode, *, right: bool) -> dict[str, float]:
    """Return an episode's numbers, those of its family and of its kind (with or without a successful call) by
    their names."""
    called = played.successful_calls > 0
    family, kind = question.family, "with_call" if called else "without_call"
    figures = {
        "valid_calls": float(played.successful_calls),
        "accuracy": float(right),
        f"accuracy_{kind}": float(right),
        f"{family}/accuracy": float(right),
        f"{family}/RaPR": float(called),
    }
    if not question.plan_known:
        return figures
    needs = "needed" if question.plan else "not_needed"
    figures |= {f"{needs}/accuracy": float(right), f"{needs}/RaPR": float(called)}
    return figures | ({f"{needs}/evidence": float(looked(question, played))} if right else {})


def boundary_name(phase: str, steps: int) -> str:
    """Return the file of a phase's end. Steps belong to the name: a run that goes back and on again must
    still find the earlier end when it is killed and resumed."""
    return f"{phase}-{steps:07d}.safetensors"


def save_weights(file: Path, weights: Weights) -> None:
    """Write policy and teacher, completely or not at all."""
    if rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        tensors = {
            f"{adapter}/{name}": t.contiguous()
            for adapter in ("policy", "teacher")
            for name, t in weights.tensors(adapter).items()
        }
        save_file(tensors, partial)
        partial.replace(file)
    wait_for_all()


def load_weights(file: Path, weights: Weights) -> None:
    tensors = load_file(file)
    for adapter in ("policy", "teacher"):
        weights.load(adapter, {name: tensors[f"{adapter}/{name}"] for name in weights.tensors(adapter)})
