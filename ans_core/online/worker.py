"""Tasks of a store in, published snapshots out: the one process that learns. Rollouts, GRPO and training
states are those of `ans_core.rl` and `ans_core.train.loop`.

A killed worker goes on from its last training state: tasks that later updates had used are put back into the
queue.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ans_core.agent.policy import AgentPolicy
from ans_core.config.online import RELEASES, Online
from ans_core.dist import rng_of
from ans_core.online import overview, picture_files
from ans_core.online.alerts import alerts
from ans_core.online.canary import refused
from ans_core.online.learning import LOOP, OnlineLoop
from ans_core.online.practice import Lesson, OnlinePractice
from ans_core.online.retention import evict, sweep
from ans_core.online.snapshots import Snapshots
from ans_core.online.store import Store, Task
from ans_core.rl.batch import rl_batch
from ans_core.rl.dual_loop import Batches
from ans_core.train import loop
from ans_core.train.loop import Machine, Schedule
from ans_core.types import ImageRef, Log, Request, Sample

ADAPTERS = ("policy", "teacher", "reference", "served")
"""The first is trained, the second its moving average (what is published), the third the start (the KL's),
the fourth what is served."""
POLL_S = 0.2
ALERT_EVERY_S = 3600.0
SEGMENT = "segment"
"""The store's key for the number of updates before the present segment."""
PROGRESS = "progress"
"""The store's key for the practice's progress at the end of the segment before."""

BEGUN = "begun"
"""The store's key for the segment that was begun last, and the version that was served then."""


class Stopped(Exception):
    """There is nothing more to do: the tasks are at their end, or learning is frozen."""


@dataclass(eq=False, kw_only=True)
class Worker:
    """Makes the steps of a training loop from a store, and releases what it learned."""

    policy: AgentPolicy
    store: Store
    snapshots: Snapshots
    practice: OnlinePractice
    canary: Callable[[str], list[bool]]
    """Adapter -> whether it answers each of the canary's questions right."""
    settings: Online
    waits: bool
    """Wait for tasks for ever, at the settings' pace; else stop where there are none, or learning is frozen."""
    ask: Callable[[str, Sequence[ImageRef], bool], Request]
    """(question, frames, clip) -> request."""
    replayed: Callable[[int], tuple[Request, str, str]]
    """Number -> a question, its answer and form."""
    seed: int
    truth: Callable[[Task], str | None] = lambda task: None
    """Of a simulation: what metrics hold labels against."""
    before_batch: Callable[[int], None] = lambda step: None
    """Of a simulation: what fills the queue before each update."""

    def __post_init__(self) -> None:
        self.module: OnlineLoop | None = None
        self.publish_every = self.settings.update.optim.save_every
        self.base = 0
        """Updates before the first step of the training loop."""
        self.update = 0
        """All updates so far."""
        self._begun = False
        self._last_update_s = 0.0
        self._alerted: dict[str, float] = {}
        self._counts = overview.counts(self.store)
        self._start: list[bool] | None = None
        """What the start has right of the canary, once it is measured."""

    def run(
        self, module: OnlineLoop, *, schedule: Schedule, machine: Machine, scratch: Path, log: Log
    ) -> bool:
        """Learn until the schedule's steps are done; False if there was nothing more to do before."""
        self.module, self._begun = module, False
        self.practice.take_back()
        # the base's weights are as they are served
        dtype = "bf16" if self.policy.model.dtype == torch.bfloat16 else machine.dtype
        # Batches come from the open store and the lessons of this one process.
        # `batch` waits for tasks
        machine = replace(machine, workers=0, deepspeed_stage=0, dtype=dtype, ends_at_once=True)
        try:
            loop.train(
                module, self.batch, name="online", schedule=schedule, machine=machine, seed=self.seed,
                scratch=scratch, log=log, after_step=self.after_step,
            )  # fmt: skip
        except Stopped:
            return False
        if not self._begun:  # killed after the last state of all: no batch was asked for
            self._begin(schedule.steps)
        self._settle(self.base + schedule.steps)
        return True

    def run_for_ever(
        self, make: Callable[[], OnlineLoop], *, schedule: Schedule, machine: Machine, scratch: Path, log: Log
    ) -> None:
        """Learn in segments of the schedule's steps, so that curves and training states stay small. A segment
        begins with the served weights, new moments of the optimizer and the progress of the one before.
        Returns where there is nothing more to do."""
        while True:
            self.base = int(self.store.meta(SEGMENT) or 0)
            folder = scratch / f"{self.base:09d}"
            for old in set(scratch.glob("[0-9]*")) - {folder}:  # of a worker that was killed before it could
                shutil.rmtree(old, ignore_errors=True)
            module = make()
            done = self.run(module, schedule=schedule, machine=machine, scratch=folder, log=log)
            self.practice.take_back()
            if (self.update - self.base) % self.publish_every and self.snapshots.frozen() is None:
                self.release(self.update)  # the segment ends early: what it learned is not to be lost
            # the training state, which has it too, goes with its folder
            progress = json.dumps(self.practice.state())
            self.store.set_meta({SEGMENT: str(self.update), PROGRESS: progress})
            self._settle(self.update)
            shutil.rmtree(folder, ignore_errors=True)
            if not done:
                return

    # Before an update

    def batch(self, step: int, micro: int) -> Batches:
        """Return the samples of an update, as soon as there are some and the pace allows it. Raises
        Stopped."""
        if not self._begun:
            self._begin(step)
        elif step % self.publish_every == 0:
            self._settle(self.base + step)  # the training loop has written the state by now
        self.practice.take_back()  # the loop skips a step that is not finite: its tasks still wait
        self.before_batch(step)
        self._adopt()
        lessons = self._lessons(step)
        # one task alone: is it at fault?
        replay = 0 if self.practice.progress.at_once == 1 else self.settings.replayed
        first = (self.base + step) * self.settings.replayed
        for number in range(first, first + replay):
            request, answer, form = self.replayed(number)
            lessons.append(Lesson(name=f"replay {number}", request=request, form=form, truth=answer))
        self._last_update_s = time.monotonic()
        self.practice.begin(lessons)
        samples = [_sample(lesson) for lesson in lessons]
        made = rl_batch(samples, [s.question or "" for s in samples], self.policy.model, mask_size=1)
        return Batches(
            batches=[made],
            of={LOOP: 0},
            learned=len(samples),
            rollout=self.base + step,
            micro=micro,
            inner=0,
            step=step,
        )

    def _begin(self, step: int) -> None:
        """Bring store and weights together: the training state is of update `step`, or there is none and the
        served version counts."""
        self._begun, self.update = True, self.base + step
        sweep(self.store)
        self.store.reopen(self.base + step)
        self._settle(self.base + step)
        if step == 0 and (saved := self.store.meta(PROGRESS)) is not None:
            self.practice.load(json.loads(saved))
        progress, served = self.practice.progress, self.snapshots.served()
        if step == 0:
            self._take(self._served_at_begin(served))
        elif served > progress.version:
            self._go_back(progress.version, served, why="the worker goes on from an earlier training state")
        self._load("served", self.snapshots.load(self.snapshots.served()).tensors)

    def _settle(self, update: int) -> None:
        """Take tasks of updates whose weights are on disk out of the queue."""
        self.store.settle(update)
        # from here on, the training state says how to go on
        if update > self.base and self.store.meta(BEGUN) is not None:
            self.store.set_meta({BEGUN: None})

    def _served_at_begin(self, served: int) -> int:
        """Return the version with which this segment begins. One that a killed worker has published since is
        taken back: the tasks that it learned from wait again. What somebody rolled back to by hand stands."""
        base, version = json.loads(self.store.meta(BEGUN) or "[-1, -1]")
        begun_again = base == self.base and version != served
        if begun_again and self._go_back(version, served, why="the worker begins its segment again"):
            return int(version)
        self.store.set_meta({BEGUN: json.dumps([self.base, served])})
        return served

    def _go_back(self, version: int, served: int, *, why: str) -> bool:
        """Serve an earlier version again, if it is there and nobody went back by hand; return whether."""
        if self.snapshots.rolled_back() or version not in self.snapshots.versions():
            return False
        self.snapshots.roll_back(version, why=why, frozen=self.snapshots.frozen(), instead_of=served)
        return True

    def _adopt(self) -> None:
        """Go on from another version if somebody rolled back to it."""
        if (served := self.snapshots.served()) != self.practice.progress.version:
            self._take(served)

    def _take(self, version: int) -> None:
        """Take a version's weights over, bit for bit; the optimizer's moments stay."""
        tensors = self.snapshots.load(version).tensors
        for adapter in ("policy", "teacher", "served"):
            self._load(adapter, tensors)
        self.practice.progress.version = version

    def _load(self, adapter: str, tensors: dict[str, Tensor]) -> None:
        device = self.policy.model.device
        self.policy.adapters.load(adapter, {name: tensor.to(device) for name, tensor in tensors.items()})

    def _await_tasks(self, step: int) -> list[Task]:
        start_s, progress, update = time.monotonic(), self.practice.progress, self.settings.update
        most = min(progress.at_once or self.settings.tasks, self.settings.tasks)
        self._drop_stale()  # the update before may have been a release
        while True:
            frozen, suspects = self.snapshots.frozen(), progress.suspects
            waiting = [
                number for number in self.store.waiting(most + len(suspects)) if number not in suspects
            ][:most]
            if frozen is None and sum(progress.refusals) >= self.settings.release.roll_backs:
                progress.refusals.clear()  # somebody let it go on
            now_s = time.monotonic()
            patient = self.waits and now_s - start_s < update.patience_s
            enough = len(waiting) == most or (waiting and not patient)
            early = self.waits and update.per_minute and now_s - self._last_update_s < 60 / update.per_minute
            warm = self._is_warm()
            if enough and warm and not early and frozen is None:
                if self._drop_stale():  # of those that came meanwhile, or since somebody rolled back
                    continue
                break
            if not self.waits and (frozen is not None or not waiting or not warm):
                raise Stopped(frozen or "no task waits")
            time.sleep(POLL_S if self.waits else POLL_S / 10)
        evict(self.store)
        self.practice.neighbours.follow(self.store)
        return self.store.tasks([*waiting, *self._revisited(step, set(waiting))])

    def _is_warm(self) -> bool:
        neighbours, cold_start = self.practice.neighbours, self.settings.admission.cold_start
        if len(neighbours) < cold_start:
            neighbours.follow(self.store)
        return len(neighbours) >= cold_start

    def _drop_stale(self) -> bool:
        """Drop tasks that were answered too many releases ago, but those of which a person said something;
        return whether there were any."""
        waiting = self.store.tasks(self.store.waiting(self.store.limits.queue))
        recent = self.snapshots.recently_served(self.settings.update.max_lag + 1) if waiting else set()
        old = [task for task in waiting if task.policy not in recent]
        if stale := [task for task in old if not task.was_judged]:
            self.store.drop(stale, "stale")
        return bool(stale)

    def _revisited(self, step: int, without: set[int]) -> list[int]:
        if self.practice.progress.at_once:
            return []
        candidates = [
            number
            for number in self.store.labelled("admitted", 50 * max(1, self.settings.revisited))
            if number not in without
        ]
        return rng_of(self.seed, "revisit", self.base + step).sample(
            candidates, min(self.settings.revisited, len(candidates))
        )

    def _lessons(self, step: int) -> list[Lesson]:
        while True:
            tasks = self._await_tasks(step)
            pictures = self._pictures(tasks)
            if tasks and len(pictures) == len(tasks):
                return [self._lesson(task, pictures[task.experience]) for task in tasks]

    def _lesson(self, task: Task, frames: Sequence[bytes]) -> Lesson:
        request = self.ask(task.question, frames, task.clip)
        return Lesson(
            name=f"experience {task.experience}",
            request=request,
            form=task.form,
            task=task,
            truth=self.truth(task),
        )

    def _pictures(self, tasks: Sequence[Task]) -> dict[int, tuple[bytes, ...]]:
        """Read the tasks' pictures, so that a step that has begun needs no files. A task whose pictures can't
        be read leaves the queue with a verdict of its own; one that was forgotten meanwhile is left out."""
        pictures: dict[int, tuple[bytes, ...]] = {}
        for task in tasks:
            try:
                pictures[task.experience] = tuple(picture_files.read(path) for path in task.frames)
            except ValueError:
                if self.store.tasks([task.experience]):
                    self.store.drop([task], "unreadable")
                    message = (
                        f"a picture of experience {task.experience} is missing or damaged: it is not "
                        "learned from"
                    )
                    self.store.note("alert", kind="unreadable", told=message)
        return pictures

    # After an update

    def after_step(self, step: int) -> dict[str, float]:
        """Write down what became of the tasks, and release every so many updates."""
        assert self.module is not None, "run sets it"
        metrics = self.module.after_step(step)
        self.update = self.base + step + 1
        outcomes = self.practice.finish()
        self.store.finish(self.update, outcomes)
        for lost in (outcome.experience for outcome in outcomes if outcome.verdict == "not_finite"):
            self.store.note(
                "alert",
                kind="not_finite",
                told=f"loss or gradient of experience {lost} is not finite: it is not learned from",
            )
        if (step + 1) % self.publish_every == 0:
            metrics |= {f"canary/{name}": value for name, value in self.release(self.update).items()}
        self._alert(metrics)
        return metrics

    def release(self, update: int) -> dict[str, float]:
        """Measure the moving average; serve it, or go back to what is served. Too many refusals freeze the
        worker."""
        progress = self.practice.progress
        if self._start is None:
            self._start = self.canary("reference")
        new = self.canary("teacher")
        why = refused(new, self._start, allowed=self.settings.release.allowed_loss)
        accuracies = {"source": fmean(new)} if new else {}
        if why is None:
            teacher = {name: tensor.cpu() for name, tensor in self.policy.adapters.tensors("teacher").items()}
            about = self.policy.about()
            version = self.snapshots.publish(
                teacher, after=progress.version, update=update, about=about, measured={"canary": accuracies}
            )
            if version is not None:
                self._load("served", teacher)
                progress.version = version
                progress.refusals.append(False)
            return {**accuracies, "refused": 0.0}
        last = [*progress.refusals, True][-RELEASES:]
        of = f"{sum(last)} of the last {len(last)} releases were refused"
        frozen = f"{of}, this one for {why}" if sum(last) >= self.settings.release.roll_backs else None
        if self.snapshots.roll_back(progress.version, why=why, frozen=frozen, instead_of=progress.version):
            progress.roll_backs += 1
            progress.refusals.append(True)
        self._take(self.snapshots.served())  # somebody else's roll-back stands
        return {**accuracies, "refused": 1.0}

    def _alert(self, metrics: dict[str, float]) -> None:
        now, counts = time.monotonic(), overview.counts(self.store)
        for kind, sentence in alerts(metrics, counts, self._counts).items():
            if now - self._alerted.get(kind, -ALERT_EVERY_S) >= ALERT_EVERY_S:
                self._alerted[kind] = now
                self.store.note("alert", kind=kind, told=sentence)
        self._counts = counts


def _sample(lesson: Lesson) -> Sample:
    """Return the lesson as RL's batches hold it."""
    frames: Any = lesson.request.frames
    return Sample(
        sample_id=lesson.name, dataset="online", image_id=lesson.name, frames=frames, height=1, width=1,
        task="conversation", text=lesson.truth or "", question=lesson.request.text,
    )  # fmt: skip
