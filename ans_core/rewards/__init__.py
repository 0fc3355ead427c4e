"""Rewards: (answer, truth) -> a number in [0, 1]; the truth itself earns 1. A new one is a file and a line in
REWARDS, its name in ans_core/config/names.py and in WORDLESS or MASKLESS where it fits; then `make dvc`."""

from collections.abc import Callable, Collection, Iterable, Sequence

from ans_core.rewards.cider import cider_of
from ans_core.rewards.confidence import confidence
from ans_core.rewards.format import well_formed
from ans_core.rewards.iou import iou, soft
from ans_core.rewards.kinds import Reward
from ans_core.rewards.meteor import meteor_nltk, meteor_surface

__all__ = ["CORPUS_REWARDS", "MASKLESS", "REWARDS", "WORDLESS", "Reward", "corpus_rewards"]

REWARDS: dict[str, Reward] = {
    "iou": iou,
    "soft_iou": soft,
    "meteor": meteor_surface,
    "meteor_nltk": meteor_nltk,
    "format": well_formed,
    "confidence": confidence,
}

WORDLESS = frozenset({"iou", "soft_iou", "format", "confidence"})
"""Rewards that do not read the true text."""

MASKLESS = frozenset({"meteor", "meteor_nltk", "cider", "confidence"})
"""Rewards that do not read the true mask."""

CORPUS_REWARDS: dict[str, Callable[[Sequence[str]], Reward]] = {"cider": cider_of}
"""Rewards that weigh words by how rare they are among the true texts."""


def corpus_rewards(corpus: Iterable[str], *, needed: Collection[str]) -> dict[str, Reward]:
    """Make only the `needed` rewards, because CIDEr keeps 39 KB per text; the corpus is not read for none."""
    return {name: made(list(corpus)) for name, made in CORPUS_REWARDS.items() if name in needed}
