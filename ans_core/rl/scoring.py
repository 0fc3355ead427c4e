"""Rewards of answers: predictions of a step in, a tensor for each reward part out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.benchmarks.loops import true_mask
from ans_core.rl.step import RolloutStep
from ans_core.types import Prediction


def score(
    step: RolloutStep,
    answers: Sequence[Prediction],
    weights: Collection[str],
    truths: Sequence[Prediction] = (),
) -> dict[str, Float[Tensor, "B G"]]:
    """Compute every reward part of B x G answers (text and mask, or text alone) against the truths: the
    samples' texts and masks, unless given."""
    size = step.settings.group
    with step.timer.part("reward"):
        drawn = bool(answers[0].masks)
        truths = truths or [
            Prediction(text=s.text, masks=((true_mask(s),),) if drawn and s.masks else ())
            for s in step.batch.samples
        ]
        judged = [replace(answer, text=answer.text.rstrip(".")) for answer in answers]
        return {
            name: torch.tensor([step.rewards[name](a, truths[i // size]) for i, a in enumerate(judged)]).view(
                -1, size
            )
            for name in weights
        }
