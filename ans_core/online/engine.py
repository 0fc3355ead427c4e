"""Questions in, answers out, always from the last whole snapshot; what was asked goes into the store's queue.

Nothing that happens to the worker or to the store keeps an answer back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ans_core.agent.crops import CropFeatures
from ans_core.agent.play import PlayedEpisode
from ans_core.agent.policy import AgentPolicy
from ans_core.online.embedding import Encoder
from ans_core.online.neighbours import Neighbours
from ans_core.online.retention import evict
from ans_core.online.snapshots import Snapshots
from ans_core.online.store import Experience, NameTaken, Store
from ans_core.online.verifiers import form_of
from ans_core.types import ImageRef, Request

NEAREST = 5
"""Neighbours that calibrate the confidence."""
EVICT_EVERY_S = 3600.0
"""The worker evicts before each update; where none runs, what is too old still goes."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A question about a picture or a clip. `request` names it: asked again, it is kept once."""

    request: str
    question: str
    frames: tuple[bytes, ...]
    clip: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the engine says. answer: None where the episode ran into a limit."""

    answer: str | None
    version: int
    confidence: float | None
    """How well the votes agreed on the most similar experiences; None where none of them has a label."""
    experience: int | None
    """Its id in the store; None: not kept."""
    why_not_kept: str = ""
    turns: tuple[str, ...] = ()


@dataclass(eq=False, kw_only=True)
class Engine:
    """Answers with one adapter of a policy, into which it loads the served snapshot. For one thread."""

    policy: AgentPolicy
    play: Callable[[str, Sequence[Request]], list[PlayedEpisode]]
    """(adapter, requests) -> episodes, greedily."""
    store: Store
    snapshots: Snapshots
    features: CropFeatures
    adapter: str
    ask: Callable[[str, Sequence[ImageRef], bool], Request]
    """(question, frames, clip) -> request."""
    batch: int
    """Questions that are answered together."""
    read_only: bool = False
    """Answers are given, nothing is kept."""

    def __post_init__(self) -> None:
        self.encoder, self.neighbours = Encoder(self.policy, self.features), Neighbours()
        self.version = -1
        self.trouble = ""
        """Why what is served could not be read; the snapshot before is used."""
        self._evicted_s = -math.inf
        self.refresh()

    def refresh(self) -> None:
        """Load what is served now. A store or snapshot that can't be read leaves the one before in place; the
        first must be readable."""
        try:
            served = self.snapshots.served()
            if served == self.version:
                self.trouble = ""
                return
            tensors = self.snapshots.load(served).tensors
        except (OSError, ValueError) as error:
            if self.version < 0:
                raise
            self.trouble = str(error)
            return
        device = self.policy.model.device
        self.policy.adapters.load(self.adapter, {name: tensor.to(device) for name, tensor in tensors.items()})
        self.version, self.trouble = served, ""

    def answer(self, queries: Sequence[Query]) -> list[Reply]:
        """Answer questions. Raises ValueError for pictures that can't be read."""
        self.refresh()
        requests = [self.ask(one.question, one.frames, one.clip) for one in queries]
        played = self.play(self.adapter, requests)
        return [self._reply(one, episode) for one, episode in zip(queries, played, strict=True)]

    def _reply(self, query: Query, played: PlayedEpisode) -> Reply:
        vector = self.encoder.vector(query.question, played.overviews[0])
        shares: list[float] = []
        experience, why = None, "read-only"
        try:
            self.neighbours.follow(self.store)
            nearest = self.store.votes([number for number, _ in self.neighbours.search(vector, NEAREST)])
            shares = [share for _, share, _ in nearest.values()]
            if not self.read_only:
                self._evict()
                new = Experience(
                    request=query.request, question=query.question, frames=query.frames, clip=query.clip,
                    form=form_of(query.question),
                    answer=played.answer, policy=self.version,
                )  # fmt: skip
                experience = self.store.add(new, vector)
                why = "" if experience is not None else "the queue is full"
        except (
            OSError,
            NameTaken,
        ) as error:  # a full disk or a damaged store takes no experience, but the answer is there
            why = str(error)
        return Reply(
            answer=played.answer,
            version=self.version,
            confidence=fmean(shares) if shares else None,
            experience=experience,
            why_not_kept=why,
            turns=tuple(turn.text for turn in played.turns),
        )

    def _evict(self) -> None:
        if time.monotonic() - self._evicted_s >= EVICT_EVERY_S:
            evict(self.store)
            self._evicted_s = time.monotonic()
