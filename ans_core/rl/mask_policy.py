"""Masks as actions: the policy's mask output -> G masks to try, and the log-probability of a tried mask under
any later policy.

A mask that one `[SEG]` token decodes to has no randomness of its own: the token's log-probability teaches
nothing about its shape. Each policy here adds randomness in a different place; a new one is a class and a
line in MASK_POLICIES.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

TARGET_IOU = (0.75, 0.92)
"""Range to which the width steers a group's mean pairwise IoU: masks differ enough to learn from, and are
still plausible."""
WIDTH_STEP = 0.05


@dataclass(frozen=True, kw_only=True)
class PolicyOutput:
    """The mask output of a policy for B texts."""

    embeddings: Float[Tensor, "B C"]
    """Embeddings of the `[SEG]` tokens, as the mask decoder gets them."""
    logits: Float[Tensor, "B h w"]
    """Logits of the chosen mask: the one with the best predicted IoU."""
    choices: Float[Tensor, "B M H W"]
    """The decoder's M masks."""
    ious: Float[Tensor, "B M"]
    """Their predicted IoUs."""
    words: Float[Tensor, " B"]
    """Mean log-probability of the answer's tokens."""


@dataclass(frozen=True, kw_only=True)
class MaskActions:
    """Sampled actions, stored so that a later log-probability never samples again."""

    choice: Tensor
    """(B, G, ...) the numbers that were sampled."""
    masks: Bool[Tensor, "B G h w"]
    confidence: Float[Tensor, "B G"]
    """Mean probability that the mask's pixels are foreground, 0.5 to 1; 0 where it is empty."""
    scale: float
    width: float

    def take(self, rows: Tensor) -> MaskActions:
        """Keep these samples."""
        return replace(
            self, choice=self.choice[rows], masks=self.masks[rows], confidence=self.confidence[rows]
        )


Decode = Callable[[Float[Tensor, "P C"]], Float[Tensor, "P h w"]]
"""Decode embeddings to mask logits with the acting decoder; G embeddings for each of the B pictures, in
order."""

Click = Callable[[Float[Tensor, "P 2"]], Float[Tensor, "P C"]]
"""Embed clicks at (x, y), shares of the picture, as prompts for `Decode`."""


@dataclass(frozen=True, kw_only=True)
class MaskSampling:
    """How a policy explores in one step."""

    width: float
    scale: float
    generators: Sequence[torch.Generator]
    """One per sample."""
    group: int
    decode: Decode
    click: Click

    def normal(self, *shape: int) -> Float[Tensor, "B G *shape"]:
        """Return normal noise from the samples' generators."""
        return torch.stack(
            [torch.randn((self.group, *shape), generator=g, device=g.device) for g in self.generators]
        )

    def actions(self, choice: Tensor, logits: Float[Tensor, "B G h w"]) -> MaskActions:
        masks = logits > 0
        confidence = mean_probability(logits.sigmoid(), masks)
        return MaskActions(
            choice=choice, masks=masks, confidence=confidence, scale=self.scale, width=self.width
        )


def mean_probability(p: Float[Tensor, "*P h w"], masks: Bool[Tensor, "*P h w"]) -> Float[Tensor, "*P"]:
    """Return the mean probability of the pixels in a mask; 0 for an empty mask."""
    return torch.where(masks, p, 0.0).sum((-2, -1)) / masks.sum((-2, -1)).clamp(min=1)


@runtime_checkable
class MaskPolicy(Protocol):
    explores: ClassVar[bool]
    """Whether the width can be steered."""

    def spread(self, output: PolicyOutput) -> float:
        """Return the unit in which the width is measured: a mean over samples."""

    def act(self, output: PolicyOutput, sampling: MaskSampling) -> MaskActions:
        """Sample G masks for each sample, with the sample's generator."""

    def log_prob(self, output: PolicyOutput, actions: MaskActions) -> Float[Tensor, "B G"]:
        """Return the log-probability of the stored actions, up to a constant, as the mean over an action's
        numbers: a sum would make every ratio extreme."""

    def kl(self, output: PolicyOutput, reference: PolicyOutput, actions: MaskActions) -> Float[Tensor, ""]:
        """Return the exact KL(policy || reference) of the action distributions, per number, averaged over
        samples."""


class _Gaussian(ABC):
    """Gaussian noise around a mean that the gradient reaches."""

    explores: ClassVar[bool] = True

    @abstractmethod
    def mean(self, output: PolicyOutput) -> Tensor:
        """Return the mean of the action, (B, ...)."""

    def log_prob(self, output: PolicyOutput, actions: MaskActions) -> Float[Tensor, "B G"]:
        mean = self.mean(output) / actions.scale
        return -(actions.choice - mean[:, None]).pow(2).flatten(2).mean(2) / (2 * actions.width**2)

    def kl(self, output: PolicyOutput, reference: PolicyOutput, actions: MaskActions) -> Float[Tensor, ""]:
        difference = (self.mean(output) - self.mean(reference)) / actions.scale
        return difference.pow(2).mean() / (2 * actions.width**2)


@dataclass(frozen=True)
class GridGaussian(_Gaussian):
    """The action is a grid of cells x cells around the pooled logits, so that whole parts of a mask grow or
    shrink; detail within a cell is kept. The gradient reaches everything that draws, including SAM2's mask
    decoder."""

    cells: int

    def mean(self, output: PolicyOutput) -> Float[Tensor, "B K K"]:
        return F.adaptive_avg_pool2d(output.logits[:, None], self.cells)[:, 0]

    def spread(self, output: PolicyOutput) -> float:
        return float(output.logits.flatten(1).std(1).mean())

    def act(self, output: PolicyOutput, sampling: MaskSampling) -> MaskActions:
        noise = sampling.normal(self.cells, self.cells)
        change = (
            sampling.scale
            * sampling.width
            * F.interpolate(noise, size=output.logits.shape[-2:], mode="bilinear", align_corners=False)
        )
        choice = self.mean(output)[:, None] / sampling.scale + sampling.width * noise
        return sampling.actions(choice, output.logits[:, None] + change)


class SegGaussian(_Gaussian):
    """The action is the `[SEG]` embedding; the mask decoder is part of the environment and gets no
    gradient."""

    def mean(self, output: PolicyOutput) -> Float[Tensor, "B C"]:
        return output.embeddings

    def spread(self, output: PolicyOutput) -> float:
        return float(output.embeddings.std(1).mean())

    def act(self, output: PolicyOutput, sampling: MaskSampling) -> MaskActions:
        choice = output.embeddings[:, None] / sampling.scale + sampling.width * sampling.normal(
            output.embeddings.shape[1]
        )
        logits = sampling.decode((sampling.scale * choice).flatten(0, 1)).unflatten(
            0, (len(choice), sampling.group)
        )
        return sampling.actions(choice, logits)


class Bernoulli:
    """Each pixel is sampled independently with probability sigmoid(logit / width): the most exploration, and
    speckled masks."""

    explores: ClassVar[bool] = True

    def spread(self, output: PolicyOutput) -> float:
        return 1.0

    def act(self, output: PolicyOutput, sampling: MaskSampling) -> MaskActions:
        p = (output.logits / sampling.width).sigmoid()
        draws = torch.stack(
            [
                torch.rand((sampling.group, *p.shape[1:]), generator=g, device=p.device)
                for g in sampling.generators
            ]
        )
        masks = draws < p[:, None]
        confidence = mean_probability(p[:, None].expand_as(masks), masks)
        return MaskActions(
            choice=masks, masks=masks, confidence=confidence, scale=sampling.scale, width=sampling.width
        )

    def log_prob(self, output: PolicyOutput, actions: MaskActions) -> Float[Tensor, "B G"]:
        z = (output.logits / actions.width)[:, None]
        return torch.where(actions.choice, F.logsigmoid(z), F.logsigmoid(-z)).mean((2, 3))

    def kl(self, output: PolicyOutput, reference: PolicyOutput, actions: MaskActions) -> Float[Tensor, ""]:
        z, fixed = output.logits / actions.width, reference.logits / actions.width
        on = z.sigmoid()
        each = on * (F.logsigmoid(z) - F.logsigmoid(fixed)) + (1 - on) * (
            F.logsigmoid(-z) - F.logsigmoid(-fixed)
        )
        return each.mean()


class Multimask:
    """The action is the index of one of the decoder's masks; the logits are the predicted IoUs / width.
    Log-probabilities are exact and discrete, but there are only as many masks to explore as the decoder
    outputs."""

    explores: ClassVar[bool] = True

    def spread(self, output: PolicyOutput) -> float:
        return 1.0

    def act(self, output: PolicyOutput, sampling: MaskSampling) -> MaskActions:
        p = (output.ious / sampling.width).softmax(1)
        rows = zip(p, sampling.generators, strict=True)
        choice = torch.stack(
            [torch.multinomial(row, sampling.group, replacement=True, generator=g) for row, g in rows]
        )
        logits = output.choices[torch.arange(len(p), device=p.device)[:, None], choice]
        return sampling.actions(choice, logits)

    def log_prob(self, output: PolicyOutput, actions: MaskActions) -> Float[Tensor, "B G"]:
        return (output.ious / actions.width).log_softmax(1).gather(1, actions.choice)

    def kl(self, output: PolicyOutput, reference: PolicyOutput, actions: MaskActions) -> Float[Tensor, ""]:
        policy, fixed = (
            (output.ious / actions.width).log_softmax(1),
            (reference.ious / actions.width).log_softmax(1),
        )
        return F.kl_div(fixed, policy, log_target=True, reduction="batchmean")


class Place:
    """The action is which thing to draw, found by a click: a pixel is sampled by the mask's logits (in units
    of their standard deviation and the width), and SAM2 is clicked there. If that draws much the same thing,
    the mask stays as it is; if not, the click's mask is tried. So a group can reach other things, which noise
    on a mask can't, and is not paid for how well clicks draw.

    The log-probability is that of a click anywhere in the mask that was drawn, as if all of these drew it.
    The gradient moves the mask towards things that earned more, whole; what a click draws is part of the
    environment."""

    explores: ClassVar[bool] = True

    def log_probs(self, logits: Float[Tensor, "B h w"], width: float) -> Float[Tensor, "B N"]:
        """Return the log-probability of a click on every pixel, row by row. The unit is no part of the
        action: with a gradient through it, a smaller mask, whose logits stand out more, would be surer of its
        thing."""
        flat = logits.flatten(1)
        centred = (flat - flat.mean(1, keepdim=True)).detach()
        deviation = torch.linalg.vector_norm(centred, dim=1, keepdim=True) / flat.shape[1] ** 0.5
        return (flat / (width * deviation.clamp(min=1e-6))).log_softmax(1)

    def spread(self, output: PolicyOutput) -> float:
        return 1.0

    def act(self, output: PolicyOutput, sampling: MaskSampling) -> MaskActions:
        return self.draw(output.logits, sampling)

    def draw(self, logits: Float[Tensor, "B h w"], sampling: MaskSampling) -> MaskActions:
        rows = zip(self.log_probs(logits, sampling.width).exp(), sampling.generators, strict=True)
        choice = torch.stack(
            [torch.multinomial(row, sampling.group, replacement=True, generator=g) for row, g in rows]
        )
        own = logits[:, None].expand(-1, sampling.group, -1, -1)
        clicked = sampling.decode(sampling.click(middles(choice, own.shape[-2:]).flatten(0, 1))).view_as(own)
        both, either = (
            (one.flatten(2).sum(2)) for one in ((own > 0) & (clicked > 0), (own > 0) | (clicked > 0))
        )
        other = both < SAME_THING * either
        return sampling.actions(choice, torch.where(other[:, :, None, None], clicked, own))

    def log_prob(self, output: PolicyOutput, actions: MaskActions) -> Float[Tensor, "B G"]:
        return self.drawn(output.logits, actions)

    def drawn(self, logits: Float[Tensor, "B h w"], actions: MaskActions) -> Float[Tensor, "B G"]:
        """Return the log-probability of the things that were drawn."""
        # also where a click draws something beside it
        inside = actions.masks.flatten(2).scatter(2, actions.choice[:, :, None], True)
        logps = self.log_probs(logits, actions.width)[:, None].expand_as(inside)
        return logps.masked_fill(~inside, -torch.inf).logsumexp(2)

    def kl(self, output: PolicyOutput, reference: PolicyOutput, actions: MaskActions) -> Float[Tensor, ""]:
        policy, fixed = (self.log_probs(known.logits, actions.width) for known in (output, reference))
        return F.kl_div(fixed, policy, log_target=True, reduction="batchmean")


SAME_THING = 0.5
"""Of the union of two masks, the share that they have in common if they draw the same thing."""


def middles(pixel: Int[Tensor, "B G"], size: tuple[int, ...]) -> Float[Tensor, "B G 2"]:
    """Return the middles (x, y) of pixels, numbered row by row, as shares of the picture. size: its height
    and width."""
    height, width = size
    return torch.stack([(pixel % width + 0.5) / width, (pixel // width + 0.5) / height], dim=-1)


class Token:
    """The algorithm as first written down: the "action" is the answer's tokens, which are given. All masks of
    a group are the same, so every advantage and the gradient are 0. It is kept to show this."""

    explores: ClassVar[bool] = False

    def spread(self, output: PolicyOutput) -> float:
        return 1.0

    def act(self, output: PolicyOutput, sampling: MaskSampling) -> MaskActions:
        logits = output.logits[:, None].expand(-1, sampling.group, -1, -1)
        return sampling.actions(torch.zeros(logits.shape[:2], device=logits.device), logits)

    def log_prob(self, output: PolicyOutput, actions: MaskActions) -> Float[Tensor, "B G"]:
        return output.words[:, None].expand(-1, actions.choice.shape[1])

    def kl(self, output: PolicyOutput, reference: PolicyOutput, actions: MaskActions) -> Float[Tensor, ""]:
        return 0.0 * output.words.sum()


MASK_POLICIES: dict[str, Callable[[int], MaskPolicy]] = {
    "grid_gaussian": GridGaussian,
    "seg_gaussian": lambda cells: SegGaussian(),
    "bernoulli": lambda cells: Bernoulli(),
    "multimask": lambda cells: Multimask(),
    "place": lambda cells: Place(),
    "token": lambda cells: Token(),
}
"""Name -> constructor, which takes the number of grid cells on a side."""


def steered(width: float, pairwise_iou: float) -> float:
    """Return the next step's width: wider if the group's masks are too alike, narrower if they are too
    different."""
    low, high = TARGET_IOU
    return width * math.exp(WIDTH_STEP * ((pairwise_iou > high) - (pairwise_iou < low)))
