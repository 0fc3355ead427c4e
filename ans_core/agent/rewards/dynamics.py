"""Curiosity by learning progress: a small forward model learns, from step to step, what a call will show; an
episode earns by how much better its own transitions are predicted than some steps ago.

The error itself would pay for looking at noise for ever (the noisy TV); its decrease pays for what is being
learned, and for nothing once it is known or where there is nothing to learn.

A transition is a call that shows something (ZOOM_IN, SELECT_FRAMES): s is the picture that the call names, or
the overview, and s' what it shows. Features phi are those of the frozen vision tower, which were made for the
episode anyway; the call's embedding is a fixed function of operation, arguments and seed. Calls that answer
in words alone have no transition.

f is ridge regression on decayed sums of x x^T and x y^T, not a network trained by gradients: it has no
learning rate whose choice would decide how long something stays new, its solution does not depend on the
order of episodes, and sums over processes give all of them the same model. With the decay, an older and a
newer model rest on as many observations in the long run, so noise, which both predict equally badly, earns
nothing on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.agent.crops import Crop, CropFeatures, pooled, pooled_grey
from ans_core.agent.play import PlayedEpisode
from ans_core.agent.protocol import Call
from ans_core.agent.rewards.running import RunningNorm, moments
from ans_core.agent.workspace import FIRST, THOUSAND, Workspace
from ans_core.dist import seed_of
from ans_core.rl.grpo import Total

SIZE = 32
"""Of the features of a picture and of a call's embedding, both of length 1."""
INPUTS = 1 + 3 * SIZE
"""P: 1, phi(s), a and their product, for what a box shows depends on the picture. With phi(s') (K) behind it
a row has X = P + K."""
RIDGE = 10.0
"""Weight of the prior, that nothing is predicted: with less of it the first models fit noise, and getting
over that looked like progress (48 random transitions a step: -.39, then +.19 at 1; -.06, then +.006 at 10;
what can be learned has +.24 to +.79 either way)."""
DECAY = 0.98
"""Of the sums, per step that has transitions."""
LAG = 5
"""Such steps that the older model is behind the newest one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardModel:
    """f(phi(s), a) -> phi(s'). It starts by predicting 0."""

    sums: Float[Tensor, "P X"]
    """x x^T and x y^T over all transitions so far, decayed."""
    weights: tuple[Float[Tensor, "P K"], ...]
    """Of the last LAG + 1 models, oldest first."""

    @classmethod
    def new(cls) -> ForwardModel:
        start = torch.zeros(INPUTS, SIZE, dtype=torch.float64)
        return cls(sums=no_sums(), weights=(start,))

    def after(self, step: Float[Tensor, "P X"]) -> ForwardModel:
        """Return it after a step's transitions of all processes, as sums; without any nothing changes."""
        if not step[0, 0]:  # x begins with 1, so this counts them
            return self
        sums = DECAY * self.sums + step
        moments, products = sums.split([INPUTS, SIZE], dim=1)
        weights = torch.linalg.solve(moments + RIDGE * torch.eye(INPUTS, dtype=sums.dtype), products)
        return ForwardModel(sums=sums, weights=(*self.weights, weights)[-LAG - 1 :])

    def errors(self, xy: Float[Tensor, "T X"]) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
        """Return squared distances of what the oldest kept model and the newest one predict of each
        transition."""
        x, y = xy.split([INPUTS, SIZE], dim=1)
        older, newest = ((y - x @ weights).square().sum(1) for weights in (self.weights[0], self.weights[-1]))
        return older, newest


def no_sums() -> Float[Tensor, "P X"]:
    return torch.zeros(INPUTS, INPUTS + SIZE, dtype=torch.float64)


def sums_of(xy: Float[Tensor, "T X"]) -> Float[Tensor, "P X"]:
    return xy[:, :INPUTS].T @ xy


class Dynamics:
    """The part `dynamics` of a practice: what it keeps from step to step, and of this step."""

    def __init__(self, features: CropFeatures, *, seed: int) -> None:
        self.transitions = Transitions(features, seed=seed)
        self.model = ForwardModel.new()
        self.norm = RunningNorm()
        self._sums = no_sums()
        self._earned: list[float] = []

    def earned(self, played: PlayedEpisode) -> tuple[float, dict[str, float]]:
        """Return an episode's progress, normalised by its running mean and spread, and numbers for the
        metrics: the progress itself and, where there are transitions, the newest model's error. What is
        learned of the episode counts from the next step on.

        The progress is the mean over its transitions of the older model's error less the newest one's;
        neither has seen this step. 0 without transitions. The mean, since more calls are not more progress;
        not cut at 0, or noise would be paid for its good half."""
        xy = self.transitions.of(played)
        self._sums += sums_of(xy)
        older, newest = self.model.errors(xy)
        made = float((older - newest).mean()) if len(xy) else 0.0
        self._earned.append(made)
        return self.norm(made), {"dynamics": made} | (
            {"dynamics_error": float(newest.mean())} if len(xy) else {}
        )

    def end_rollouts(self, total: Total) -> None:
        self.model = self.model.after(total(self._sums))
        self.norm = self.norm.after(*total(moments(self._earned)).tolist())
        self._sums = no_sums()
        self._earned.clear()

    def state(self) -> dict[str, Any]:
        return {"sums": self.model.sums, "weights": list(self.model.weights), "norm": self.norm.steps}

    def load(self, state: dict[str, Any]) -> None:
        self.model = ForwardModel(sums=state["sums"], weights=tuple(state["weights"]))
        self.norm = RunningNorm(steps=state["norm"])


class Transitions:
    """Episodes -> rows of x and y. For one model; features of pictures come from those that episodes were
    played with."""

    def __init__(self, features: CropFeatures, *, seed: int) -> None:
        self.features, self.seed = features, seed
        self._grey = pooled_grey(features)

    def of(self, played: PlayedEpisode) -> Float[Tensor, "T X"]:
        rows = [
            _row(
                self._phi([about(played.episode.workspace, call)]),
                embedding(call, seed=self.seed),
                self._phi(shown),
            )
            for call, shown in looks(played)
        ]
        return torch.stack(rows) if rows else no_sums()[:0]

    def _phi(self, crops: Sequence[Crop]) -> Float[Tensor, " K"]:
        """Return the mean of pictures, less what all pictures have in common, at length 1."""
        seen = (
            torch.stack([pooled(one) - self._grey for one in self.features.of(crops)])
            .mean(0)
            .flatten()
            .double()
        )
        return _unit(seen @ _projection(len(seen), self.seed))


def looks(played: PlayedEpisode) -> Iterator[tuple[Call, Sequence[Crop]]]:
    """Yield calls that showed something, and what."""
    for turn in played.turns:
        if turn.shown is not None and turn.shown.crops:
            assert turn.shown.observation.call is not None
            yield turn.shown.observation.call, turn.shown.crops


def about(workspace: Workspace, call: Call) -> Crop:
    """Return the picture that a call names, or the overview."""
    return Crop.of(workspace, call.arguments.get("image") or FIRST)


def embedding(call: Call, *, seed: int) -> Float[Tensor, " K"]:
    """Embed a call at length 1, the same at all times: a sum of one direction for the operation and one for
    each argument. Numbers stretch theirs, so that boxes side by side are alike; other values have directions
    of their own."""
    vector = _direction(seed, call.name)
    for path, value in _leaves(call.arguments, (call.name,)):
        if isinstance(value, int | float) and not isinstance(value, bool):
            vector = vector + max(-1.0, min(1.0, value / THOUSAND)) * _direction(seed, *path)
        else:
            vector = vector + _direction(seed, *path, str(value))
    return _unit(vector)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict | list):
        for key, inner in sorted(value.items()) if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value


def _row(
    before: Float[Tensor, " K"], call: Float[Tensor, " K"], after: Float[Tensor, " K"]
) -> Float[Tensor, " X"]:
    return torch.cat([before.new_ones(1), before, call, SIZE**0.5 * before * call, after])


@lru_cache(maxsize=4096)
def _direction(*parts: object) -> Float[Tensor, " K"]:
    return (
        torch.from_numpy(np.random.default_rng(seed_of("direction", *parts)).standard_normal(SIZE))
        / SIZE**0.5
    )


@lru_cache(maxsize=2)
def _projection(size: int, seed: int) -> Float[Tensor, "C K"]:
    return torch.from_numpy(
        np.random.default_rng(seed_of("projection", seed, size)).standard_normal((size, SIZE))
    )


def _unit(values: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """Return the vector at length 1; a vector of nothing (a grey picture) stays as it is."""
    return values / values.norm().clamp(min=1e-9)
