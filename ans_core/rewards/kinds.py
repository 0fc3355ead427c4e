"""What a reward is: (answer, truth) -> a number in [0, 1]; the truth itself earns 1. NaN: not to be told, so the answer is left out."""

from collections.abc import Callable

from ans_core.types import Prediction

Reward = Callable[[Prediction, Prediction], float]
