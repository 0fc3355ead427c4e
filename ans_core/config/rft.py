"""Settings of the agent's stage `rft`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ans_core.config.names import FamilyName
from ans_core.config.section import Count, Impossible, Positive, Rate, Section, Share, Weight
from ans_core.config.training import Checkpointing, Dtype, Optim


class PhaseEnd(Section):
    """A phase of the rewards ends at the first of these."""

    threshold: float
    slope: float = 0.001
    """Rise per evaluation, over the last 5, below which the measure has stopped rising."""
    steps: Positive


class RewardPhases(Section):
    """Curiosity counts from the first step on, coherence from the second phase, penalties from the third."""

    base: PhaseEnd = PhaseEnd(threshold=0.7, steps=60)
    """Measured by the accuracy of what is sampled."""
    coherence: PhaseEnd = PhaseEnd(threshold=0.08, steps=60)
    """Measured by the mean coherence; the shortest plans of all five families have .087."""
    every: Positive = 10
    """Steps between evaluations."""
    allowed_loss: Share = 0.05
    """A phase is taken back, with the weights of its beginning, if it costs more accuracy than this, and than
    chance."""


class Rft(Section):
    """GRPO on whole episodes, from the agent's SFT."""

    optim: Optim = Optim(steps=200, batch=8, lr=2e-4, weight_decay=0.0, save_every=25)
    """`batch` counts questions."""
    often: dict[FamilyName, Positive] = {}
    """Questions of a family in every turn of all families, 1 where it is not named. Groups about what the
    agent answers anyway tie, and teach nothing."""
    dtype: Dtype = "auto"
    checkpointing: Checkpointing = "none"
    group: Annotated[int, Field(ge=6)] = 6
    """Episodes about one question (G). A smaller group hardly ever has a call and none side by side where
    calls are rare."""
    inner_steps: Positive = 1
    temperature: Rate = 1.0
    objective: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo"] = "dapo"
    clip_low: Rate = 0.2
    clip_high: Rate = 0.28
    kl: Weight = 0.001
    entropy: Weight = 0.0
    scale_rewards: Literal["group", "batch", "within", "none"] = "within"
    std_floor: Rate = 0.02
    ema: Share = 0.99
    """Decay of the teacher towards the policy, per update."""
    curiosity: Weight = 1.0
    """Weight of the bonus for calls that work while few episodes have one, and of the price of calls beyond
    the shortest plan's."""
    curious_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the steps over which the bonus falls to 0."""
    evidence: Weight = 0.2
    """Weight of 1 for an episode that looked at the things asked about, right or wrong; where no operation is
    needed it has none."""
    coherence: Weight = 0.1
    penalty: Weight = 1.0
    least_calls: Share = 0.0
    """The run stops where fewer of the episodes that need an operation had a successful call, in the mean of the
    last ten steps with such questions: the agent has unlearned to look. 0 = never."""
    phases: RewardPhases = RewardPhases()
    samples_every: Count = 25

    def check_shares(self, *, processes: int) -> None:
        """Raise ValueError if a step has not a question for each micro-batch of each process."""
        self.optim.check_shares("agent.rft", self.optim.batch, "questions", processes=processes)

    @model_validator(mode="after")
    def _possible(self) -> Rft:
        if self.optim.batch % self.optim.accumulate:
            raise Impossible(
                "optim.batch",
                f"{self.optim.batch} questions can't be shared out to {self.optim.accumulate} micro-batches",
            )
        return self
