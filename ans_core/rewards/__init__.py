"""Rewards: (answer, truth) -> a number in [0, 1]; the truth itself earns 1. A new one is a file and a line here."""

from collections.abc import Callable

from ans_core.rewards.format import well_formed
from ans_core.rewards.iou import iou
from ans_core.rewards.meteor import meteor_nltk, meteor_surface
from ans_core.types import Prediction

Reward = Callable[[Prediction, Prediction], float]

REWARDS: dict[str, Reward] = {
    "iou": iou,
    "meteor": meteor_surface,
    "meteor_nltk": meteor_nltk,
    "format": well_formed,
}
