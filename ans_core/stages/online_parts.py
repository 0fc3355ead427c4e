"""Settings -> the parts of learning online, for the stage `online` and for `ans agent`: policy, store,
snapshots, engine, worker."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ans_core.agent import asking
from ans_core.agent.crops import CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import operations_told
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.policy import AgentPolicy, load_policy
from ans_core.agent.workspace import Workspace
from ans_core.checkpoints import checkpoint
from ans_core.config import Config, Rl
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.config.online import Shift
from ans_core.online.admission import Gate
from ans_core.online.canary import right
from ans_core.online.embedding import encoder_name
from ans_core.online.engine import Engine
from ans_core.online.learning import KlControl, OnlineLoop
from ans_core.online.neighbours import Neighbours
from ans_core.online.practice import Confirm, Lesson, OnlinePractice, Relabel
from ans_core.online.simulation import CANARY_FROM, REPLAY_FROM, QuestionStream
from ans_core.online.snapshots import Snapshots
from ans_core.online.store import FILE, Store, Task
from ans_core.online.verifiers import confirmed_answer
from ans_core.online.worker import ADAPTERS, Worker
from ans_core.precision import inference_dtype
from ans_core.stages.launch import schedule_of
from ans_core.stages.operations import rl_of_episodes, toolbox_of
from ans_core.train.loop import Machine, Schedule
from ans_core.types import ImageRef, Log, Request

SERVED = ADAPTERS[3]
START = "start"
"""The store's key for the hash of the adapter that it began with."""
LEAST_BYTES, COPIES = 100_000_000, 20
"""Room that a store begins with: for pictures, and so many copies of the adapter: snapshots, and two training
states with moments."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Which of the tiers are in force; all of them, unless a trial leaves some out."""

    admission: bool = True
    """Gate, weights of labels, flips; else every majority is learned from, with weight 1."""
    verification: bool = True
    update: bool = True
    """KL and replay. The clip of gradients is the optimizer's, and stays."""
    release: bool = True
    """Moving average, canary, roll-back, freeze; else the policy's own weights are served."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One open store with the model that works on it."""

    cfg: Config
    policy: AgentPolicy
    toolbox: Toolbox
    store: Store
    snapshots: Snapshots
    features: CropFeatures
    families: tuple[str, ...]
    """Of the questions that are replayed and that the canary asks."""

    @property
    def limits(self) -> EpisodeSettings:
        return self.cfg.agent.episode

    def ask(self, question: str, frames: Sequence[ImageRef], clip: bool = False) -> Request:
        """Return a question as the agent was taught to be asked. Several frames are a clip anyway."""
        operations = operations_told(
            self.toolbox, self.policy.lists_operations(self.cfg.agent.episode.operations_told)
        )
        return Request(
            frames=tuple(frames), text=asking.first_turn(question, operations), clip=clip or len(frames) > 1
        )

    def questions(self, *, split: str, first: int, shift: Shift | None = None) -> QuestionStream:
        """Return questions of the agent's own world."""
        return QuestionStream(
            self.families, split=split, seed=self.cfg.seed, tile=self.toolbox.tile, first=first, shift=shift
        )

    def labelled(self, questions: QuestionStream, number: int) -> tuple[Request, str, str]:
        """Return a drawn question as request, answer and form."""
        question = questions.number(number)
        return self.ask(question.text, question.frames), question.answer, question.family

    def play(self, adapter: str, requests: Sequence[Request]) -> list[PlayedEpisode]:
        """Play an episode for each request with an adapter, greedily."""
        with self.policy.adapters.using(adapter):
            return play(self.policy.model, self.toolbox, requests, limits=self.limits, features=self.features)

    def engine(self, *, read_only: bool = False) -> Engine:
        return Engine(
            policy=self.policy, play=self.play, store=self.store, snapshots=self.snapshots,
            features=self.features, adapter=SERVED, ask=self.ask, batch=self.limits.batch,
            read_only=read_only,
        )  # fmt: skip


@contextmanager
def opened(
    cfg: Config,
    *,
    base: Path,
    start: Path | None,
    folder: Path,
    machine: Machine,
    families: Sequence[str],
    names: Sequence[str] = ADAPTERS,
    must_begin: bool = False,
) -> Iterator[Parts]:
    """Open a store and load its policy: its first snapshot, or `start` (an adapter's folder), which becomes
    the first one of a new store. A store that began with another adapter goes on from that, with a warning.

    Raises ValueError for a store or snapshots of another base, or with `must_begin` a store that began with
    another adapter, and OSError for a full disk, before a model is loaded.
    """
    base_hash = checkpoint.weights_hash(base)
    encoder = encoder_name(base_hash)
    with Store(
        folder,
        encoder=encoder if start is not None or (folder / FILE).exists() else None,
        limits=cfg.agent.online.keeping,
    ) as store:
        snapshots = Snapshots(store, base_hash=base_hash, keep=cfg.agent.online.release.keep)
        first = snapshots.path(0)
        source = first if first.is_dir() else start
        if source is None:
            raise ValueError(f"{folder} has no first snapshot; start `ans agent serve`, which makes it")
        check_room(folder, source)
        if start is not None and store.meta(START) not in (None, checkpoint.weights_hash(start)):
            other = (
                f"{folder} began with another agent than {start}; a new store (--store) begins with this one"
            )
            if must_begin:
                raise ValueError(other)
            logging.warning("%s", other)
        dtype = inference_dtype(machine.device)
        policy = load_policy(
            base,
            source,
            operations=OPERATIONS,
            device=machine.device,
            names=names,
            dtype=dtype,
            reader=cfg.agent.reader,
        )
        if store.meta("served") is None:
            tensors = {name: tensor.cpu() for name, tensor in policy.adapters.tensors(names[0]).items()}
            snapshots.publish(tensors, after=None, update=0, about=policy.about(), measured={})
            store.set_meta({START: checkpoint.weights_hash(start or source)})
        with toolbox_of(cfg, policy.model, adapters_off=policy.base) as toolbox:
            features = CropFeatures(policy.model)
            yield Parts(
                cfg=cfg, policy=policy, toolbox=toolbox, store=store, snapshots=snapshots, features=features,
                families=tuple(families),
            )  # fmt: skip


def check_room(folder: Path, adapter: Path) -> None:
    """Check for room for snapshots and training states. Raises OSError."""
    need = LEAST_BYTES + COPIES * sum(file.stat().st_size for file in adapter.glob("*.safetensors"))
    if (free := shutil.disk_usage(folder).free) < need:
        raise OSError(
            f"{folder} needs about {need / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB left; free some, "
            "or name another folder"
        )


def worker_of(
    parts: Parts,
    *,
    waits: bool,
    guard: Guard | None = None,
    wrap: Callable[[Confirm], Confirm] = lambda confirm: confirm,
    relabel: Relabel | None = None,
    truth: Callable[[Task], str | None] = lambda task: None,
    before_batch: Callable[[int], None] = lambda step: None,
) -> Worker:
    """Make the worker. waits: for tasks, for ever. The others are of trials: what verification is turned
    into, labels that are changed, what metrics hold them against, what fills the queue."""
    cfg, guard = parts.cfg, guard or Guard()
    online = cfg.agent.online
    admission, release = online.admission, online.release

    def confirm(lesson: Lesson, looked: Workspace | None) -> str | None:
        assert lesson.task is not None, "replayed questions have their answer"
        picture = Workspace.of(lesson.request.frames, clip=lesson.task.clip)
        return confirmed_answer(lesson.task.question, picture, parts.toolbox, looked=looked)

    gate = Gate(
        share=admission.gate if guard.admission else 0.0,
        verification=admission.verification and guard.verification,
        flips=admission.flips if guard.admission else 1.0,
    )
    practice = OnlinePractice(
        store=parts.store, toolbox=parts.toolbox, neighbours=Neighbours(), features=parts.features,
        limits=parts.limits, gate=gate,
        strategy=admission.strategy if guard.admission else "majority", weigh_labels=guard.admission,
        confirm=wrap(confirm) if guard.verification else None, relabel=relabel,
    )  # fmt: skip
    practice.progress.beta = online.update.beta if guard.update else 0.0
    questions = parts.questions(split="train", first=CANARY_FROM)
    asked = [parts.labelled(questions, number) for number in range(release.canary if guard.release else 0)]

    def canary(adapter: str) -> list[bool]:
        played = parts.play(adapter, [request for request, _, _ in asked])
        return right(played, [answer for _, answer, _ in asked])

    if not guard.update:
        online = online.model_copy(update={"update": online.update.model_copy(update={"replay": 0.0})})
    replayed = parts.questions(split="train", first=REPLAY_FROM)
    return Worker(
        policy=parts.policy, store=parts.store, snapshots=parts.snapshots, practice=practice, canary=canary,
        settings=online, waits=waits, ask=parts.ask,
        replayed=lambda number: parts.labelled(replayed, number), seed=cfg.seed, truth=truth,
        before_batch=before_batch,
    )  # fmt: skip


def loop_of(parts: Parts, worker: Worker, *, guard: Guard | None = None, log: Log) -> OnlineLoop:
    """Make the loss module of a segment."""
    update, guard = parts.cfg.agent.online.update, guard or Guard()
    control = (
        KlControl(target=update.kl_target)
        if guard.update
        else KlControl(low=0.0, high=0.0, target=float("inf"))
    )
    return OnlineLoop(
        parts.policy.adapters, control=control, practice=worker.practice,
        settings=rl_settings(parts.cfg, guard), seed=parts.cfg.seed, points=0, loss_weights=(0.0, 0.0),
        rewards={}, log=log,
    )  # fmt: skip


def rl_settings(cfg: Config, guard: Guard) -> Rl:
    """Return the settings of RL's steps. Advantages are centred rewards alone, so that a label's weight
    scales them. Without the release tier the moving average has decay 0: it is the policy."""
    update = cfg.agent.online.update
    return rl_of_episodes(
        cfg, update.optim, dtype="fp32", group=update.group, temperature=update.temperature,
        clip_low=update.clip_low, clip_high=update.clip_high, kl=update.beta, scale_rewards="none",
        ema=update.ema if guard.release else 0.0, ema_warmup=False, samples_every=0,
    )  # fmt: skip


def schedule(cfg: Config, *, steps: int | None = None) -> Schedule:
    """Return the schedule of an arm or a segment."""
    made = schedule_of(cfg.agent.online.update.optim)
    return replace(made, steps=steps or made.steps)
