"""Tasks of the store as an RL loop's practice: episodes on the real operations, scored against a label that
votes and verification gave.

Each of G rollouts is scored against the vote, never the vote against itself. A task that the gate does not
admit gives no reward at all: its group has advantage 0, and only the KL term sees it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

from ans_core.agent.crops import Crop, CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.play import PlayedEpisode
from ans_core.agent.practice import play_groups, rollout_of
from ans_core.agent.workspace import Workspace
from ans_core.agent.world.question import looked_at, normal, same_answer
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.config.online import RELEASES
from ans_core.model.backbones.base import ImageFeatures
from ans_core.online.admission import Gate, Marginal
from ans_core.online.neighbours import Neighbours
from ans_core.online.store import Outcome, Store, Task, Verdict
from ans_core.online.voting import Decision, Strategy, Vote, decide, entropy
from ans_core.rl.batch import Box
from ans_core.rl.grpo import Total
from ans_core.rl.practice import PlayedRollout
from ans_core.rl.step import RolloutStep
from ans_core.types import RLE, ImageRef, Request

NEAR = 0.98
"""Similarity from which an experience with the same words counts as the same question. Others' answers are no
votes on this one."""
MOST_NEAR = 2
"""Votes of near-duplicates: never as many as a group has rollouts."""
ADMITTED: Verdict = "admitted"
RECENT = 100
"""Tasks that alerts look back on."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one group of episodes is about: a task of the store, or a question with a known answer
    (replay)."""

    name: str
    """Sample id."""
    request: Request
    form: str
    task: Task | None = None
    truth: str | None = None
    """Of a replayed question, its label. Of a simulated task, what the label is held against in the metrics,
    and nothing else."""


@dataclass(kw_only=True)
class Progress:
    """What is kept from step to step."""

    version: int = 0
    """The snapshot that the weights come from."""
    roll_backs: int = 0
    """Releases that were refused, of all."""
    refusals: deque[bool] = field(default_factory=lambda: deque(maxlen=RELEASES))
    """Whether each of the last ones was refused."""
    at_once: int = 0
    """Most waiting tasks of the next update, after one that was not finite; 0: as many as ever."""
    suspects: list[int] = field(default_factory=list)
    """Tasks whose own updates were not finite. They are left out, and given up once an update without them is
    finite: else the weights are at fault, and nothing is given up."""
    beta: float = 0.01
    marginal: Marginal = field(default_factory=Marginal)
    recent: deque[tuple[str, bool, bool]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """(verdict, visited before, flipped) of the last tasks."""

    def state(self) -> dict[str, Any]:
        return {
            **vars(self),
            "marginal": self.marginal.state(),
            "recent": [list(row) for row in self.recent],
            "refusals": list(self.refusals),
            "suspects": list(self.suspects),
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Progress:
        rows: list[tuple[str, bool, bool]] = [
            (str(v), bool(visited), bool(flipped)) for v, visited, flipped in state["recent"]
        ]
        restored = {
            "marginal": Marginal.of(state["marginal"]),
            "recent": deque(rows, maxlen=RECENT),
            "refusals": deque(state.get("refusals", ()), maxlen=RELEASES),
            "suspects": list(state.get("suspects", ())),
        }
        return cls(**{**state, **restored})


Confirm = Callable[[Lesson, Workspace | None], str | None]
"""The answer of an independent operation path, which finds things by words, or where an episode's workspace
says that it looked; None if there is none."""
Relabel = Callable[[Task, Decision], Decision]


@dataclass(eq=False, kw_only=True)
class OnlinePractice:
    """`ans_core.rl.practice.Practice` on the lessons of a step."""

    store: Store
    toolbox: Toolbox
    neighbours: Neighbours
    features: CropFeatures
    limits: EpisodeSettings
    gate: Gate
    strategy: Strategy
    weigh_labels: bool
    """Common labels weigh less (`Marginal.weight`); else each weighs 1."""
    confirm: Confirm | None
    """None = no vote is verified."""
    relabel: Relabel | None = None
    """Changes decisions, for trials with wrong labels."""

    def __post_init__(self) -> None:
        self.lessons: dict[str, Lesson] = {}
        """Those of the step that comes, by sample id."""
        self.outcomes: list[Outcome] = []
        """Of the tasks of this step."""
        self.progress = Progress()
        self._before: dict[str, Any] | None = None
        """The progress before the step that is being made; None between steps."""

    # Episodes

    def play(self, step: RolloutStep) -> list[PlayedRollout]:
        lessons = [self.lessons[sample.sample_id] for sample in step.batch.samples]
        requests = [lesson.request for lesson in lessons]
        groups = play_groups(step, self.toolbox, requests, limits=self.limits, features=self.features)
        scored = [self._scored(lesson, group) for lesson, group in zip(lessons, groups, strict=True)]
        return [*chain.from_iterable(scored)]

    def encode(self, parts: Sequence[tuple[ImageRef, Box]]) -> list[ImageFeatures]:
        return self.features.of([Crop(frame=frame, box=box) for frame, box in parts])

    def _scored(self, lesson: Lesson, group: Sequence[PlayedEpisode]) -> list[PlayedRollout]:
        if lesson.task is None:
            assert lesson.truth is not None, "a replayed question has its answer"
            return [
                _rollout(episode, label=normal(lesson.truth), weight=1.0, measured={}) for episode in group
            ]
        decision, verdict = self._judged(lesson, lesson.task, group)
        label, weight = decision.label if verdict == ADMITTED else None, 1.0
        truth = None if lesson.truth is None else normal(lesson.truth)
        measured = {
            "admitted": float(label is not None),
            "share": decision.share,
            "verified": float(decision.verified),
        }
        # after them come near-duplicates' votes
        if (differ := entropy(decision.votes[: len(group)])) is not None:
            measured["answer_entropy"] = differ
        if label is not None:
            if self.weigh_labels:
                weight = self.progress.marginal.weight(lesson.form, label)
            self.progress.marginal.add(lesson.form, label)
            if truth is not None:
                measured["label_right"] = float(label == truth)
        rollouts = []
        for episode in group:
            metrics = dict(measured)
            if label is not None and truth is not None and episode.answer is not None:
                answer = normal(episode.answer)
                metrics["reward_right"] = float((answer == label) == (answer == truth))
            rollouts.append(_rollout(episode, label=label, weight=weight, measured=metrics))
        return rollouts

    def _judged(self, lesson: Lesson, task: Task, group: Sequence[PlayedEpisode]) -> tuple[Decision, Verdict]:
        votes = [*self._rollout_votes(lesson, group), *self._near_votes(task)]
        if task.true_answer is not None:
            person = Vote(source="person", answer=task.true_answer, verified=True, by="person")
            decision = decide([*votes, person], self.strategy).with_label(task.true_answer)
            verdict = ADMITTED
        else:
            wrong = None if task.wrong_answer is None else normal(task.wrong_answer)
            decision = decide([vote for vote in votes if wrong is None or vote.label != wrong], self.strategy)
            if self.relabel is not None:
                decision = self.relabel(task, decision)
            verdict = self.gate.verdict(task, decision)
        flipped = task.label is not None and decision.label is not None and task.label != decision.label
        self.progress.recent.append((verdict, bool(task.visits), flipped))
        self.outcomes.append(
            Outcome(
                experience=task.experience, label=decision.label, share=decision.share,
                verified=decision.verified, verdict=verdict, flipped=flipped,
                provenance=decision.provenance(), feedback_s=task.feedback_s,
            )
        )  # fmt: skip
        return decision, verdict

    def _rollout_votes(self, lesson: Lesson, group: Sequence[PlayedEpisode]) -> list[Vote]:
        """Return the rollouts' votes. Verified once by words; where words find nothing, each one where it
        looked. Where a person has shown what is asked about, those are verified that looked at it, and the
        others have no voice."""
        if lesson.task is not None and lesson.task.mask is not None:
            return [_vote_of_look(n, lesson.task.mask, episode) for n, episode in enumerate(group)]
        confirmed = None if self.confirm is None else self.confirm(lesson, None)
        by = "words" if confirmed is not None else "place"
        votes = []
        for number, episode in enumerate(group):
            answer = None if _is_lost(episode) else episode.answer or None
            verified_answer = confirmed
            if verified_answer is None and answer is not None and self.confirm is not None:
                verified_answer = self.confirm(lesson, episode.episode.workspace)
            verified = (
                answer is not None and verified_answer is not None and same_answer(answer, verified_answer)
            )
            votes.append(
                Vote(source=f"rollout {number}", answer=answer, verified=verified, by=by if verified else "")
            )
        return votes

    def _near_votes(self, task: Task) -> list[Vote]:
        """Return the votes of experiences with (nearly) the same picture and the same words. Only admitted
        labels vote: what the gate holds back is not trusted. That they were verified says nothing of this picture: coarse
        features call pictures equal that differ in what is asked."""
        vector = self.neighbours.vector(task.experience)
        if vector is None:
            return []
        nearest = self.neighbours.search(vector, MOST_NEAR + 1)
        near = [number for number, similar in nearest if similar >= NEAR and number != task.experience]
        return [
            Vote(source=f"experience {number}", answer=label)
            for number, (label, _, question) in self.store.votes(near, verdict="admitted").items()
            if normal(question) == normal(task.question)
        ]

    # From step to step

    def begin(self, lessons: Sequence[Lesson]) -> None:
        """Begin a step about these lessons."""
        self.lessons = {lesson.name: lesson for lesson in lessons}
        self._before = self.progress.state()

    def finish(self) -> list[Outcome]:
        """End the step; return what became of its tasks, and of those that were left out of it."""
        dropped = [
            Outcome(
                experience=task.experience, label=None, share=0.0, verified=False, verdict="not_finite",
                feedback_s=task.feedback_s,
            )
            for task in self.store.tasks(self.progress.suspects)
        ]  # fmt: skip
        done, self.outcomes, self._before = [*self.outcomes, *dropped], [], None
        self.progress.at_once, self.progress.suspects = 0, []
        return done

    def take_back(self) -> None:
        """Undo a step that was begun and not finished; between steps nothing changes."""
        if self._before is not None:
            self.load(self.state())

    def _after_skipped(self, before: dict[str, Any]) -> dict[str, Any]:
        """Return the progress before a step, with what the next one does otherwise because it was skipped:
        half as many waiting tasks, down to one alone, which is a suspect if its step is skipped, too."""
        waiting = [
            lesson.task.experience
            for lesson in self.lessons.values()
            if lesson.task is not None and lesson.task.waits
        ]
        if len(self.lessons) == len(waiting) == 1:
            return {**before, "at_once": 0, "suspects": [*before["suspects"], *waiting]}
        return {**before, "at_once": max(1, len(waiting) // 2)}

    def end_rollouts(self, total: Total) -> None:
        """Nothing to sum up: one process learns online."""

    def metrics(self) -> dict[str, float]:
        recent = self.progress.recent
        visited = [flipped for _, visited, flipped in recent if visited]
        return {
            "online/version": float(self.progress.version),
            "online/roll_backs": float(self.progress.roll_backs),
            "online/beta": self.progress.beta,
            "online/recently_admitted": fmean(verdict == "admitted" for verdict, _, _ in recent)
            if recent
            else 0.0,
            "online/flip_rate": fmean(visited) if visited else 0.0,
            "online/largest_label": self.progress.marginal.largest(),
        }

    def state(self) -> dict[str, Any]:
        """Return the progress of all finished steps, and what follows from a skipped one: a training state
        that is written after that has nothing else of it."""
        return self.progress.state() if self._before is None else self._after_skipped(self._before)

    def load(self, state: dict[str, Any]) -> None:
        self.progress, self.outcomes, self._before = Progress.of(state), [], None


def _rollout(
    episode: PlayedEpisode, *, label: str | None, weight: float, measured: dict[str, float]
) -> PlayedRollout:
    """Score an episode: `weight` for the label, 0 for another answer; NaN without a label, and where it is no
    lesson."""
    lost = label is None or _is_lost(episode)
    reward = (
        math.nan if lost else weight * float(episode.answer is not None and normal(episode.answer) == label)
    )
    return rollout_of(
        episode, rewards={"task": reward, "shaping": math.nan if lost else 0.0}, measured=measured
    )


def _vote_of_look(number: int, mask: RLE, episode: PlayedEpisode) -> Vote:
    saw = not _is_lost(episode) and looked_at(mask, episode.episode.workspace)
    answer = (episode.answer or None) if saw else None
    verified = answer is not None
    return Vote(
        source=f"rollout {number}", answer=answer, verified=verified, by="person's mask" if verified else ""
    )


def _is_lost(episode: PlayedEpisode) -> bool:
    """Tell whether a limit ended it, or an operation crashed in it: it has no vote and is no lesson."""
    return episode.over_turn or episode.broke
