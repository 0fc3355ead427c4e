"""The type of a reward: (answer, truth) -> a number in [0, 1]; the truth itself earns 1. NaN: undecidable, so
the answer is left out."""

from collections.abc import Callable

from ans_core.types import Prediction

Reward = Callable[[Prediction, Prediction], float]
