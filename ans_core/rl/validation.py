"""What a policy earns on held-out samples, where nothing is sampled and nothing explores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ans_core.dist import rank, shared_sum, world_size
from ans_core.rl import grpo
from ans_core.rl.batch import RlBatch, rl_batch
from ans_core.rl.dual_loop import LOOPS, DualLoop
from ans_core.rl.rollout import Reader
from ans_core.rl.step import Exploration, RolloutStep, StepTimer
from ans_core.types import Sample

COLD = 1e-4
"""A temperature at which the likeliest word is chosen: the noise of sampling decides among words whose logits
differ by less than .002, for each sample the same way every time."""


class HeldOutRewards:
    """The rewards of the loops on held-out samples, with every answer the likeliest one and every mask the
    policy's own. The inverse model is the one that RL began with, whatever `rl.inverse` is: a policy and a
    teacher that follows it can agree on answers that nobody else reads. No judge is asked."""

    def __init__(
        self,
        module: DualLoop,
        samples: Mapping[str, Sequence[Sample]],
        *,
        batch: int,
        mask_size: int,
        autocast: torch.autocast,
    ) -> None:
        """samples: by loop. They are read anew every time, for pictures would fill memory. batch: samples at
        once, of each process."""
        self.module, self.samples, self.batch = module, samples, batch
        self.mask_size, self.autocast = mask_size, autocast
        self.settings = module.settings.model_copy(update={"group": 1, "inverse": "reference"})
        self.reader = Reader(
            temperature=COLD, forbidden=[module.model.image_token_id], guard=module.settings.logit_guard
        )

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Return `<loop>/reward` and `<loop>/reward/<part>`, `refer/denied_if_absent`, and `loss`: 1 minus the
        mean, by the loops' weights, of the shares of their best reward. All processes must call it."""
        metrics, shares = dict[str, float](), dict[str, float]()
        for name, samples in self.samples.items():
            prefix, weights = LOOPS[name].prefix, LOOPS[name].rewards(self.settings)
            with self.autocast:
                means = self._means(name, samples)
            metrics |= {f"{prefix}/{key}": value for key, value in means.items()}
            shares[name] = means["reward"] / sum(weight for weight in weights.values() if weight > 0)
        loops = {name: weight for name, weight in self.settings.loops.items() if name in shares}
        total = sum(weight * shares[name] for name, weight in loops.items())
        return {"loss": 1.0 - total / sum(loops.values()), **metrics}

    def _means(self, name: str, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the means of a loop's rewards over all processes' samples."""
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
        every = self.batch * world_size()
        for start in range(0, len(samples), every):
            numbers = range(start + rank() * self.batch, start + (rank() + 1) * self.batch)
            # processes wait for each other in a loop, so all of them take as many: the last sample again
            own = [samples[min(number, len(samples) - 1)] for number in numbers]
            counted = torch.tensor([number < len(samples) for number in numbers])
            for key, (values, known) in self._rewards(name, own).items():
                taken = values[known & counted].double()
                sums[key] += torch.stack([taken.sum(), torch.tensor(float(len(taken)))])
        keys = sorted(sums)
        total = shared_sum(torch.stack([sums[key] for key in keys]), self.module.model.device)
        return {key: value / count for key, (value, count) in zip(keys, total.tolist(), strict=True) if count}

    def _rewards(
        self, name: str, samples: Sequence[Sample]
    ) -> dict[str, tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]]:
        """Return the rewards of these samples, and for which of them they count."""
        module = self.module
        batch = rl_batch(samples, [s.text for s in samples], module.model, mask_size=self.mask_size)
        done = LOOPS[name].act(self._step(name, batch.to(module.model.device)))
        parts = {part: values[:, 0].cpu() for part, values in done.rewards.items()}
        total = grpo.weighted_sum(done.rewards, LOOPS[name].rewards(self.settings))[:, 0].cpu()
        everywhere = torch.ones(len(samples), dtype=torch.bool)
        found = {"reward": (total, everywhere)}
        found |= {f"reward/{part}": (values, everywhere) for part, values in parts.items()}
        if name == "refer":
            # the IoU of an answer about an absent thing is 1 if it draws nothing, else 0
            absent = torch.tensor([not sample.masks for sample in samples])
            found["denied_if_absent"] = (parts["iou"], absent)
        return found

    def _step(self, name: str, batch: RlBatch) -> RolloutStep:
        step = self.module.rollout_step(
            name, batch, self.module.encode(batch, masks=LOOPS[name].decodes_masks)
        )
        return replace(
            step, settings=self.settings, reader=self.reader,
            exploration=Exploration(width=0.0), timer=StepTimer(),
        )  # fmt: skip
