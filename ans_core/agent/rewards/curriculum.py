"""Which reward parts count when: `base` (the task, curiosity, evidence), then `coherence`,
then `full` (penalties, too).

A phase ends where its measure reaches a threshold, stops rising, or after so many steps. If the next one
costs too much accuracy, and more than chance, the run goes back to the boundary's weights and waits twice as
long before it tries again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot
from statistics import fmean, linear_regression, stdev
from typing import Any, Literal

from ans_core.config.rft import RewardPhases

Phase = Literal["base", "coherence", "full"]
PHASES: tuple[Phase, ...] = ("base", "coherence", "full")
PARTS: dict[Phase, tuple[str, ...]] = {
    "base": ("curiosity", "evidence"),
    "coherence": ("curiosity", "evidence", "coherence"),
    "full": ("curiosity", "evidence", "coherence", "penalty"),
}
"""Shaping parts that count, if they have a weight; the task always does."""
PLATEAU = 5
"""Evaluations that a plateau has."""
Move = Literal["stay", "advance", "roll_back"]


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Where the run is. `after` and `moved` return what follows. A phase ends by its `RewardPhases`: an evaluation is
    the mean over `every` steps, and a phase may cost `allowed_loss` of accuracy, or twice the standard error of
    the difference, if that is more."""

    phase: Phase = "base"
    steps: int = 0
    """In this phase."""
    recent: tuple[tuple[float, float], ...] = ()
    """(accuracy, coherence) of the steps since the last evaluation."""
    evaluated: tuple[tuple[float, float, float], ...] = ()
    """Their means at the last evaluations of this phase, and the accuracy's standard error."""
    boundary: tuple[str, float, float] | None = None
    """File of the weights with which the phase began, the accuracy then, and its standard error; None in
    `base`, and after a roll-back."""
    roll_backs: int = 0

    def after(self, accuracy: float, coherence: float, rules: RewardPhases) -> Curriculum:
        """Return it after one step."""
        recent = (*self.recent, (accuracy, coherence))
        grown = replace(self, steps=self.steps + 1, recent=recent)
        if len(recent) < rules.every:
            return grown
        accuracies = [a for a, _ in recent]
        error = stdev(accuracies) / len(recent) ** 0.5 if len(recent) > 1 else 0.0
        evaluation = (fmean(accuracies), fmean(c for _, c in recent), error)
        return replace(grown, recent=(), evaluated=(*self.evaluated, evaluation)[-PLATEAU:])

    def move(self, rules: RewardPhases) -> Move:
        """Return what an evaluation that has just been made leads to; between evaluations the run stays."""
        if self.recent or not self.evaluated:
            return "stay"
        accuracy, _, error = self.evaluated[-1]
        if self.boundary is not None:
            _, before, error_before = self.boundary
            if accuracy < before - max(rules.allowed_loss, 2 * hypot(error, error_before)):
                return "roll_back"
        if self.phase == "full" or self.steps < rules.every * 2**self.roll_backs:
            return "stay"
        ends = rules.base if self.phase == "base" else rules.coherence
        measure = [one[PHASES.index(self.phase)] for one in self.evaluated]
        reached = measure[-1] >= ends.threshold or self.steps >= ends.steps * 2**self.roll_backs
        flat = len(measure) == PLATEAU and linear_regression(range(PLATEAU), measure).slope < ends.slope
        return "advance" if reached or flat else "stay"

    def moved(self, move: Move, file: str = "") -> Curriculum:
        """Return the beginning of another phase. `file`: where the weights of its beginning are."""
        if move == "stay":
            return self
        step = 1 if move == "advance" else -1
        phase = PHASES[PHASES.index(self.phase) + step]
        accuracy, _, error = self.evaluated[-1]
        boundary = (file, accuracy, error) if move == "advance" else None
        return Curriculum(phase=phase, boundary=boundary, roll_backs=self.roll_backs + (move == "roll_back"))

    def state(self) -> dict[str, Any]:
        return dict(vars(self))
