"""Requests -> episodes: a model looks, calls operations and answers, many episodes in one batch.

An episode is token ids (what was said is learned, what came back is given), the crops that were shown, in the
order of the text, and the log-probabilities as they were sampled: enough to read it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Literal

import torch
import torch.nn.functional as F

from ans_core.agent import tokens
from ans_core.agent.crops import Crop, CropFeatures
from ans_core.agent.episode import Episode, Observation, Toolbox
from ans_core.agent.workspace import Workspace
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.dist import seed_of
from ans_core.inference.generation import cut_at_stop, generate, spoken_ids, text_of
from ans_core.inference.prefill import PrefilledBatch, left_padded, prompt, read_ahead
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.rl.rollout import Reader, Rollout, SampledAnswer, Segment, sample
from ans_core.types import Request

Ended = Literal["answer", "turn_tokens", "calls", "pictures", "tokens"]
"""What ended an episode: its answer, or a limit that it ran into."""
OF_EPISODE = ("calls", "pictures", "tokens")
"""Limits of the whole episode."""
BROKEN = ("crashed", "time_limit")
"""Errors that are the machine's fault."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An observation as the model reads it."""

    text: str
    """Holds an `<image>` for each of `crops`."""
    crops: tuple[Crop, ...]
    observation: Observation


Change = Callable[[Sequence[Shown]], Sequence[Shown]]
"""Observations of one turn of all episodes -> what is shown in their place (ans_core/agent/controls.py)."""


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """What the model said, and what came back."""

    text: str
    ids: tuple[int, ...]
    """With the token that ends the turn, if there was one."""
    logps: tuple[float, ...]
    """As sampled; empty for greedy and for given turns."""
    complete: bool
    """Ended by itself, not cut at `turn_tokens`."""
    planned: bool = False
    """Not the model's own words."""
    shown: Shown | None = None
    """None after the answer, and where a limit ended the episode."""
    observed_ids: tuple[int, ...] = ()
    """What was read next."""


Watch = Callable[[PlayedTurn, Workspace], None]
"""Is told every turn when it is complete, and what the episode works on after it."""


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """One episode, turn by turn. The last turn is the answer, or the one that ran into a limit."""

    opening: tuple[int, ...]
    """The first user's turn, picture included."""
    overviews: tuple[Crop, ...]
    """The pictures asked about, or a clip's first frame."""
    turns: tuple[PlayedTurn, ...]
    episode: Episode
    """Calls, observations, counts, workspace and answer."""
    ended: Ended

    @property
    def answer(self) -> str | None:
        return self.episode.answer

    @property
    def over_turn(self) -> bool:
        """Whether a limit ended it: it has no answer."""
        return self.ended != "answer"

    @property
    def is_lesson(self) -> bool:
        """Whether RL may learn from it. One that a limit of the episode ended could have gone on to anything;
        an answer that is cut off at `turn_tokens` is a wrong one. One that broke says nothing of its
        model."""
        return self.ended not in OF_EPISODE and not self.broke

    @property
    def broke(self) -> bool:
        """Whether an operation failed by the machine's fault."""
        return any(observation.error in BROKEN for observation in self.episode.observations)

    @property
    def successful_calls(self) -> int:
        return self.episode.counts["ok"]

    @property
    def prefix(self) -> tuple[int, ...]:
        """What all episodes of one question share (`rollout.Group`)."""
        return self.opening[:-1]

    @property
    def rollout(self) -> Rollout:
        """Everything after the prefix; trainable is what the model said itself."""
        segments = [Segment(ids=self.opening[-1:], trainable=False)]
        for turn in self.turns:
            segments.append(Segment(ids=turn.ids, trainable=not turn.planned))
            if turn.observed_ids:
                segments.append(Segment(ids=turn.observed_ids, trainable=False))
        return tuple(segments)

    @property
    def crops(self) -> tuple[Crop, ...]:
        """What was shown, in the order of the text: the overviews, then what came back."""
        return (
            *self.overviews,
            *(crop for turn in self.turns if turn.shown is not None for crop in turn.shown.crops),
        )

    @property
    def logps(self) -> tuple[float, ...]:
        """Of all trainable tokens."""
        return tuple(p for turn in self.turns for p in turn.logps)


@dataclass(kw_only=True)
class _Running:
    """An episode that has no end yet."""

    opening: tuple[int, ...]
    overviews: tuple[Crop, ...]
    episode: Episode
    seed: int
    plan: Sequence[str]
    turns: list[PlayedTurn] = field(default_factory=list)
    ended: Ended = "answer"

    @property
    def length(self) -> int:
        return len(self.opening) + sum(len(turn.ids) + len(turn.observed_ids) for turn in self.turns)

    def played(self) -> PlayedEpisode:
        return PlayedEpisode(
            opening=self.opening, overviews=self.overviews, turns=tuple(self.turns), episode=self.episode,
            ended=self.ended
        )  # fmt: skip


def play(
    model: Network,
    toolbox: Toolbox,
    requests: Sequence[Request],
    *,
    limits: EpisodeSettings,
    reader: Reader | None = None,
    seeds: Sequence[int] = (),
    features: CropFeatures | None = None,
    forbidden: Sequence[int] = (),
    plans: Sequence[Sequence[str]] | None = None,
    change: Change | None = None,
    watch: Watch | None = None,
    precision: Callable[[], AbstractContextManager[object]] | None = None,
) -> list[PlayedEpisode]:
    """Play an episode for each request, `limits.batch` at a time; of a clip only the first frame is seen,
    operations see all; several pictures (`stills`) are seen and numbered.

    limits: where an episode ends without an answer. A call after `calls` is refused with a word; a second one ends
    it. reader: samples from what it makes of the logits, with a seed for each episode; None says the likeliest
    token. features: cached crops, kept by the caller; new ones are added. forbidden: tokens that are never
    said (greedy alone; a reader has its own). plans: what is said in the first turns of each episode, in the
    model's place. watch: is told the turns of all episodes, as they are made. precision: of the language
    model; None is the model's own. Where episodes are to be learned from, it must be that of learning. Raises
    ValueError for requests that make no sense (see `prompt`).
    """
    assert reader is None or (len(seeds) == len(requests) and not forbidden), (
        "a reader needs a seed for each episode, and forbids itself"
    )
    player = _Player(
        model=model,
        toolbox=toolbox,
        limits=limits,
        features=features or CropFeatures(model),
        reader=reader,
        forbidden=forbidden,
        change=change,
        watch=watch,
        precision=precision or model.inference_autocast,
    )
    seeds = seeds if reader is not None else [0] * len(requests)
    plans = plans if plans is not None else [()] * len(requests)
    played: list[PlayedEpisode] = []
    for start in range(0, len(requests), limits.batch):
        some = slice(start, start + limits.batch)
        played += player.batch(requests[some], seeds[some], plans[some])
    return played


@dataclass(frozen=True, kw_only=True)
class _Player:
    """What all batches of one `play` share, as its arguments say."""

    model: Network
    toolbox: Toolbox
    limits: EpisodeSettings
    features: CropFeatures
    reader: Reader | None
    forbidden: Sequence[int]
    change: Change | None
    watch: Watch | None
    precision: Callable[[], AbstractContextManager[object]]

    @torch.no_grad()
    def batch(
        self, requests: Sequence[Request], seeds: Sequence[int], plans: Sequence[Sequence[str]]
    ) -> list[PlayedEpisode]:
        """Play episodes together to their ends."""
        workspaces = [Workspace.of(r.frames, clip=r.clip, stills=r.stills) for r in requests]
        overviews = [tuple(Crop.of(one, name) for name in one.overviews) for one in workspaces]
        seen = iter(self.features.of([*chain.from_iterable(overviews)]))
        begun: list[_Running] = []
        images: list[ImageFeatures] = []
        for request, workspace, shown, seed, plan in zip(
            requests, workspaces, overviews, seeds, plans, strict=True
        ):
            pictures = [*islice(seen, len(shown))]
            begun.append(
                _Running(
                    opening=tuple(tokens.opening_ids(self.model, request.text, [p.grids for p in pictures])),
                    overviews=shown,
                    episode=Episode(self.toolbox, workspace, max_calls=self.limits.calls),
                    seed=seed,
                    plan=plan,
                )
            )
            images.append(ImageFeatures.joined(pictures))
        first = [
            replace(request, frames=tuple(request.frames[: len(shown)]), clip=False)
            for request, shown in zip(requests, overviews, strict=True)
        ]
        with self.precision():
            prompted = prompt(self.model, first, images)
        self._to_the_end(begun, prompted)
        return [running.played() for running in begun]

    def _to_the_end(self, begun: Sequence[_Running], prompted: PrefilledBatch) -> None:
        """Play turns until every episode has its end. The rows of `prompted` are the episodes that go on."""
        active = list(begun)
        while active:
            with self.precision():
                prompted = read_ahead(self.model, prompted)
                turns = self._next_turns(prompted, active)
            shown: dict[int, Shown] = {}
            for place, turn in enumerate(turns):
                if (item := self._came_back(active[place], turn)) is not None:
                    shown[place] = item
            if self.change is not None:
                shown = dict(zip(shown, self.change([*shown.values()]), strict=True))
            images = iter(self.features.of([crop for item in shown.values() for crop in item.crops]))
            rows: list[tuple[tuple[int, ...], ImageFeatures | None]] = []
            ongoing = []
            for place, item in shown.items():
                pictures, running, said = [*islice(images, len(item.crops))], active[place], turns[place]
                ids = tuple(
                    tokens.observed_ids(
                        self.model, item.text, [p.grids for p in pictures], complete=said.complete
                    )
                )
                if running.length + len(said.ids) + len(ids) + self.limits.turn_tokens > self.limits.tokens:
                    running.ended = "tokens"
                    continue
                turns[place] = replace(said, shown=item, observed_ids=ids)
                ongoing.append(place)
                rows.append((said.ids + ids, ImageFeatures.joined(pictures) if pictures else None))
            for running, turn in zip(active, turns, strict=True):
                running.turns.append(turn)
                if self.watch is not None:
                    self.watch(turn, running.episode.workspace)
            if ongoing:
                with self.precision():
                    prompted = _continued(self.model, prompted, ongoing, rows)
            active = [active[place] for place in ongoing]

    def _next_turns(self, prompted: PrefilledBatch, active: Sequence[_Running]) -> list[PlayedTurn]:
        """Return what every episode says next: its plan's words while there are any, then the model's own."""
        number = len(active[0].turns)  # all are at the same turn
        turns: dict[int, PlayedTurn] = {}
        for place, running in enumerate(active):
            if number < len(running.plan):
                text = running.plan[number]
                ids = tuple(tokens.turn_ids(self.model, text))
                turns[place] = PlayedTurn(text=text, ids=ids, logps=(), complete=True, planned=True)
        unplanned = [place for place in range(len(active)) if place not in turns]
        if unplanned:
            batch = prompted if len(unplanned) == len(active) else _taken(prompted, unplanned)
            most = self.limits.turn_tokens
            if self.reader is not None:
                seeds = [seed_of(active[place].seed, "turn", number) for place in unplanned]
                answers = sample(self.model, batch, group=1, max_tokens=most, reader=self.reader, seeds=seeds)
            else:
                greedy = generate(self.model, batch, max_tokens=most, forbidden=self.forbidden)
                answers = [
                    SampledAnswer(ids=tuple(ids), logps=(), complete=cut_at_stop(self.model, ids)[1])
                    for ids in greedy
                ]
            for place, answer in zip(unplanned, answers, strict=True):
                text = text_of(self.model, spoken_ids(self.model, list(answer.ids)))
                turns[place] = PlayedTurn(
                    text=text, ids=answer.ids, logps=answer.logps, complete=answer.complete
                )
        return [turns[place] for place in range(len(active))]

    def _came_back(self, running: _Running, turn: PlayedTurn) -> Shown | None:
        """Run the turn's call; None where the episode ends."""
        episode = running.episode
        observation = episode.turn(turn.text)
        if observation is None:
            if not turn.complete:
                running.ended, episode.answer = "turn_tokens", None
            return None
        if len(episode.observations) > self.limits.calls + 1:
            running.ended = "calls"
            return None
        crops = tuple(Crop.of(episode.workspace, name) for name in observation.pictures)
        before = len(running.overviews) + sum(
            len(earlier.shown.crops) for earlier in running.turns if earlier.shown is not None
        )
        if before + len(crops) > self.limits.pictures:
            running.ended = "pictures"
            return None
        return Shown(text=observation.turn(), crops=crops, observation=observation)


def _taken(prompted: PrefilledBatch, places: Sequence[int]) -> PrefilledBatch:
    rows = torch.tensor(places, device=prompted.embeds.device)
    return replace(
        prompted,
        prefix_of=prompted.prefix_of[rows],
        embeds=prompted.embeds[rows],
        attention=prompted.attention[rows],
        segs=prompted.segs[rows],
        images=[prompted.images[place] for place in places],
    )


def _continued(
    model: Network,
    prompted: PrefilledBatch,
    places: Sequence[int],
    rows: Sequence[tuple[Sequence[int], ImageFeatures | None]],
) -> PrefilledBatch:
    """Return these episodes with what was said and came back, still unread; `rows`: its token ids and
    pictures."""
    taken = _taken(prompted, places)
    read = taken.prefix_attention[taken.prefix_of].sum(1) + taken.shift[taken.prefix_of]
    embeds, positions = [], []
    for number, (ids, image) in enumerate(rows):
        tensor = torch.tensor([list(ids)], device=model.device)
        new = model.embed(tensor, [None if image is None else model.project(image)], [[]])[0]
        embeds.append(torch.cat([taken.embeds[number], new]))
        order = read[number] + 1 + torch.arange(len(ids), device=model.device)[None]
        placed = model.positions(tensor, order, [image])
        positions.append(torch.cat([read[number].expand(*placed.shape[:-1], 1), placed], dim=-1))
    rest = left_padded(embeds)
    length = rest["embeds"].shape[1]
    unread = torch.cat([F.pad(row, (length - row.shape[-1], 0)) for row in positions], dim=-2)
    return replace(
        taken,
        segs=torch.zeros_like(rest["attention"]),
        embeds=rest["embeds"],
        attention=rest["attention"],
        unread=unread,
    )
