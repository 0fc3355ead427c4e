"""Settings of learning online: the stage `online`, `ans agent serve` and `ans agent worker`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ans_core.config.names import FamilyName
from ans_core.config.section import Count, Impossible, Listed, Positive, Rate, Section, Share, Weight
from ans_core.config.training import Optim

Arm = Literal["frozen", "naive", "naive_canary", "guard", "guard_verified", "wrong_verifier", "poisoned"]
RELEASES = 10
"""Releases of which too many refused ones end learning."""


class Admission(Section):
    """Which labels are learned from."""

    strategy: Literal["majority", "weighted"] = "weighted"
    """How votes are counted; weighted: a verified one six times."""
    gate: Share = 0.7
    """Share of the votes from which a label is trusted."""
    verification: bool = True
    """A label also needs a vote that another path of operations confirms."""
    cold_start: Count = 100
    """Experiences before anything is learned."""
    flips: Share = 0.34
    """Share of visits that may have changed a label."""


class Update(Section):
    """One update of the worker. `optim.batch` counts tasks, replayed questions and revisited tasks
    together."""

    optim: Optim = Optim(steps=60, batch=10, lr=2e-4, weight_decay=0.0, warmup=0.0, save_every=10)
    """`steps`: of an arm of the stage. `save_every`: updates between releases."""
    segment: Positive = 1000
    """Updates of `ans agent worker` after which optimizer and learning rate begin anew."""
    group: Annotated[int, Field(ge=2)] = 6
    """Episodes about one question, which vote on its label."""
    replay: Share = 0.2
    """Share of a batch with known answers, of the questions that the agent was trained on."""
    revisit: Share = 0.1
    """Share of a batch that was learned before."""
    temperature: Rate = 1.0
    clip_low: Rate = 0.2
    clip_high: Rate = 0.28
    beta: Rate = 0.01
    """First weight of the KL to the start."""
    kl_target: Rate = 0.05
    """Beta rises above it and falls below it, by 1.2; above twice the target an update only pulls back."""
    ema: Share = 0.999
    """Decay of the moving average that is released, per update. .999 carries 26 % of a change in 300 updates;
    runs as short as those of `tiny` need .95."""
    per_minute: Weight = 60.0
    """Most updates; 0 = no limit. The stage has none."""
    max_lag: Positive = 10
    """Tasks that are answered by a version after which more others than these were served are dropped."""
    patience_s: Rate = 5.0
    """After so long an update begins with fewer tasks."""


class Release(Section):
    """When the moving average is served."""

    canary: Positive = 200
    """Labelled questions of the agent's own training world, each family's share."""
    allowed_loss: Share = 0.02
    """Of accuracy there, against the start. A loss that chance explains is none."""
    roll_backs: Annotated[int, Field(ge=1, le=RELEASES)] = 3
    """So many refused releases of the last ten end learning, until somebody rolls back by hand."""
    keep: Positive = 3
    """Newest versions that stay on disk."""


class Keeping(Section):
    """What the store holds."""

    queue: Positive = 256
    experiences: Positive = 10_000
    days: Rate = 90.0


class Shift(Section):
    """What happens to the pictures of the simulated stream."""

    contrast: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the distance from the middle grey."""
    noise: Weight = 12.0
    """Standard deviation, in grey levels."""
    blur: Weight = 0.0
    """Radius of a Gaussian, in pixels."""


class Simulation(Section):
    """The stage `online`: the same stream of shifted questions for every arm."""

    families: Annotated[Listed[FamilyName], Field(min_length=1)] = ("pattern",)
    shift: Shift = Shift()
    arms: Listed[Arm] = ("frozen", "naive", "naive_canary", "guard", "guard_verified")
    wrong: Share = 0.2
    """Share of the questions on which the arm wrong_verifier is told another answer."""
    poison: Share = 0.3
    """Share of the labels that the arm poisoned replaces by one answer."""
    each: Positive = 60
    """Held-out questions of every family, shifted (target) and not (source)."""
    every: Positive = 20
    """Updates between two evaluations."""


class Online(Section):
    admission: Admission = Admission()
    update: Update = Update()
    release: Release = Release()
    keeping: Keeping = Keeping()
    simulation: Simulation = Simulation()

    @model_validator(mode="after")
    def _possible(self) -> Online:
        update = self.update
        if self.tasks < 1:
            raise Impossible(
                "update.replay",
                f"of a batch of {update.optim.batch} nothing is left for new tasks; lower replay and revisit",
            )
        if self.tasks > self.keeping.queue:
            raise Impossible(
                "keeping.queue",
                f"{self.keeping.queue} is less than the {self.tasks} tasks of an update; raise it",
            )
        if self.admission.cold_start > self.keeping.queue - self.tasks:
            raise Impossible(
                "admission.cold_start",
                f"{self.admission.cold_start} experiences never come together in a queue of "
                f"{self.keeping.queue};"
                " lower it, or raise keeping.queue",
            )  # fmt: skip
        if update.optim.accumulate != 1:
            raise Impossible(
                "update.optim.accumulate",
                f"{update.optim.accumulate}: an update is one micro-batch; it must be 1",
            )
        if "frozen" not in self.simulation.arms:
            raise Impossible("simulation.arms", "'frozen' is missing: the others are compared with it")
        return self

    @property
    def replayed(self) -> int:
        """Questions of a batch with known answers."""
        return round(self.update.replay * self.update.optim.batch)

    @property
    def revisited(self) -> int:
        return round(self.update.revisit * self.update.optim.batch)

    @property
    def tasks(self) -> int:
        """New tasks of a batch."""
        return self.update.optim.batch - self.replayed - self.revisited
