"""What a loop did and earned in one step: enough to learn from it, also after the run was killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ans_core.rl.batch import FramePart
from ans_core.rl.mask_policy import MaskActions
from ans_core.rl.rollout import Group, Segment
from ans_core.types import RLE


@dataclass(kw_only=True)
class Experience:
    """What a loop's policy did with B samples and the rewards it got: enough to learn from it again, also
    after the run was killed."""

    groups: tuple[Group, ...]
    regions: list[list[Bool[Tensor, "h w"]]]
    """Visual prompts of every group's row, in the format of `Packed`."""
    texts: list[str]
    """B x G captions. Of each pair of caption and mask, one is the policy's and the other the inverse
    model's."""
    masks: list[RLE]
    """B x G masks; empty if a loop has none."""
    rewards: dict[str, Float[Tensor, "B G"]]
    """Reward parts."""
    observed: list[list[FramePart]] = field(default_factory=list)
    """The pictures that each group's rollouts were shown, in the order of the packed text; empty if none
    were. Their features are encoded anew where they are needed."""
    kept: list[int] | None = None
    """Indices of these samples among the batch's candidates; None = all."""
    sampled_logps: list[tuple[float, ...]] = field(default_factory=list)
    """B x G: log-probabilities of the answer's tokens, as they were sampled."""
    actions: MaskActions | None = None
    advantage: Float[Tensor, "B G"] | None = None
    behaviour: Float[Tensor, " M"] | None = None
    """Log-probabilities of the actions (sampled tokens; loop 2: masks) under the policy that acted."""
    reference: Float[Tensor, " M"] | None = None
    """Log-probabilities of the sampled tokens under the reference."""
    reference_words: Float[Tensor, "T V"] | None = None
    """Loop 2: the reference's logits at the answers' tokens, which are given."""
    reference_masks: Float[Tensor, "B h w"] | None = None
    """Loop 2: the logits of the reference's masks."""
    metrics: dict[str, float] = field(default_factory=dict)

    def take(self, kept: Sequence[int]) -> Experience:
        """Keep these samples only; allowed until the reference or the policy has read their tokens."""
        read = (self.behaviour, self.reference, self.reference_masks)
        assert all(values is None for values in read), "reference and behaviour are of the samples that stay"
        group = next(iter(self.rewards.values())).shape[1]
        return replace(
            self,
            kept=list(kept),
            groups=tuple(self.groups[i] for i in kept),
            regions=[self.regions[i] for i in kept] if self.regions else [],
            observed=[self.observed[i] for i in kept] if self.observed else [],
            texts=[self.texts[i * group + g] for i in kept for g in range(group)],
            masks=[self.masks[i * group + g] for i in kept for g in range(group)] if self.masks else [],
            sampled_logps=[self.sampled_logps[i * group + g] for i in kept for g in range(group)]
            if self.sampled_logps
            else [],
            rewards={name: values[list(kept)] for name, values in self.rewards.items()},
            actions=None
            if self.actions is None
            else self.actions.take(torch.tensor(kept, device=self.actions.masks.device)),
        )

    def parts(self, sizes: Sequence[int]) -> list[Experience]:
        """Split into experiences of so many samples each; all have the metrics of the whole."""
        if len(sizes) == 1:
            return [self]
        ends = list(accumulate(sizes))
        spans = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return [replace(self.take(span), kept=None, metrics=dict(self.metrics)) for span in spans]

    def learned_tokens(self) -> int:
        """Count the sampled tokens that enter the loss."""
        return sum(
            len(s.ids) for group in self.groups for rollout in group.rollouts for s in rollout if s.trainable
        )

    def state(self) -> dict[str, Any]:
        """Return plain containers and tensors for a checkpoint."""
        groups = [(g.prefix, [[(s.ids, s.trainable) for s in r] for r in g.rollouts]) for g in self.groups]
        return {
            **vars(self),
            "groups": groups,
            "actions": None if self.actions is None else dict(vars(self.actions)),
        }

    @staticmethod
    def of(state: dict[str, Any]) -> Experience:
        groups = tuple(
            Group(
                prefix=prefix,
                rollouts=tuple(tuple(Segment(ids=ids, trainable=t) for ids, t in r) for r in rollouts),
            )
            for prefix, rollouts in state["groups"]
        )
        actions = None if (of := state["actions"]) is None else MaskActions(**of)
        return Experience(**{**state, "groups": groups, "actions": actions})
