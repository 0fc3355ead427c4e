"""Rollouts as segments: sampled from the model, and read again as log-probabilities. Both use the same `Reader`.

A rollout is a list of segments. Each is either sampled from the policy (trainable) or given to it: a question, a forced answer, a tool's
reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from ans_core.data.collate import pack_row, pad_rows
from ans_core.inference.generation import cut_at_stop, stopping
from ans_core.inference.prefill import PrefilledBatch, read_ahead
from ans_core.model.checkpointing import in_pieces
from ans_core.model.network import Network
from ans_core.model.packing import Packed

Guard = Literal["guard", "clip"]
"""guard: replace and count logits that are not finite, leave others alone. clip: also clamp to +-30, which removes the gradient of every
token beyond (logits 35, 28, -40 give log p = -0.13 for the first instead of -0.0009)."""

CLIP = 30.0
REPLACED = 1e4


@dataclass(frozen=True, kw_only=True)
class Segment:
    ids: tuple[int, ...]
    trainable: bool
    """True: sampled from the policy, so its log-probability is learned. False: given."""


Rollout = tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The G rollouts of one sample, which share a prefix: the picture and the question without its last token.

    Each rollout holds that last token itself, because it predicts the first token of the answer.
    """

    prefix: tuple[int, ...]
    rollouts: tuple[Rollout, ...]


class Reader:
    """Turn raw logits into the logits of the distribution that the policy samples from.

    Sampling and log-probabilities both use it: a step that only one of them took would make the behaviour policy differ from the learned
    one. top_p is 1: tokens of a cut tail would have no log-probability.
    """

    def __init__(self, *, temperature: float, forbidden: Sequence[int], guard: Guard) -> None:
        self.temperature, self.guard = temperature, guard
        self.forbidden = list(forbidden)
        """Token ids that are never sampled: the image slot, which no picture would fill when the answer is read again."""
        self.nonfinite = 0
        """Logits replaced so far."""

    def __call__(self, raw: Float[Tensor, "M V"]) -> Float[Tensor, "M V"]:
        """Apply guard, temperature and forbidden tokens in fp32: bf16 logits alone put 5 % of noise on a ratio."""
        logits = self.guarded(raw) / self.temperature
        return logits.index_fill(1, torch.tensor(self.forbidden, device=raw.device, dtype=torch.long), -torch.inf)

    def guarded(self, raw: Float[Tensor, "M V"]) -> Float[Tensor, "M V"]:
        """Return finite logits with nothing forbidden, at temperature 1: for tokens that are given."""
        logits = raw.float()
        bad = ~logits.detach().isfinite()
        if count := int(bad.sum()):
            self.nonfinite += count
            logits = torch.where(bad, torch.nan_to_num(logits.detach(), nan=-REPLACED, posinf=REPLACED, neginf=-REPLACED), logits)
        return logits.clamp(-CLIP, CLIP) if self.guard == "clip" else logits


class _GumbelSampling(LogitsProcessor):
    """Turn greedy search into sampling: argmax(logits + Gumbel noise) is a sample from softmax(logits).

    Every row has its own generator, so its tokens depend neither on the other rows nor on the process it runs in.
    """

    def __init__(self, reader: Reader, seeds: Sequence[int], device: torch.device) -> None:
        self.reader = reader
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = self.reader(scores)
        noise = torch.stack([torch.empty_like(logits[0]).exponential_(generator=g) for g in self.generators])
        noisy = logits - noise.log()
        self.logps.append(logits.log_softmax(1).gather(1, noisy.argmax(1, keepdim=True))[:, 0])
        return noisy


@dataclass(frozen=True, kw_only=True)
class SampledAnswer:
    """One sampled answer."""

    ids: tuple[int, ...]
    """Including the end-of-turn token, if there is one."""
    logps: tuple[float, ...]
    """Log-probability of every token, as it was sampled."""
    complete: bool
    """Ended by itself, not cut at max_tokens."""


class _Fp32Head(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


@cache
def _in_fp32(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a head that PEFT has wrapped, computing in fp32."""

    class Fp32(kind):  # type: ignore[misc, valid-type]
        exact = True

        def forward(self, input: Tensor, *given: Any, **named: Any) -> Tensor:
            with torch.autocast(input.device.type, enabled=False):
                found = super().forward(input.float(), *given, **named)
            assert isinstance(found, Tensor)
            return found

    return Fp32


def exact_head(model: Network) -> None:
    """Make the model's head compute in fp32 under autocast, for sampling and learning alike: logits rounded to bf16 change a
    log-probability by 0.1. SFT keeps the head in fp32, so nothing is copied; a head that PEFT has wrapped is cast."""
    head = model.vlm.lm_head
    if isinstance(head, _Fp32Head) or getattr(type(head), "exact", False):  # it is one: another class around it would be called, too
        return
    head.__class__ = _Fp32Head if isinstance(head, nn.Linear) else _in_fp32(type(head.float()))  # type: ignore[arg-type]


@torch.no_grad()
def sample(
    model: Network, prompted: PrefilledBatch, *, group: int, max_tokens: int, reader: Reader, seeds: Sequence[int]
) -> list[SampledAnswer]:
    """Sample `group` answers for each of the B requests, in request order; `seeds` has one seed per answer (B x group)."""
    prompted = read_ahead(model, prompted)
    rows = torch.arange(len(prompted.embeds), device=model.device).repeat_interleave(group)
    sampling = _GumbelSampling(reader, seeds, model.device)
    out = model.backbone.generate(
        **prompted.generate_inputs(rows, width=model.vlm.config.text_config.hidden_size),
        **stopping(model),
        max_new_tokens=max_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([sampling]),
    )
    logps = torch.stack(sampling.logps, dim=1)  # (B G, L)
    answers = []
    for generated, chances in zip(out.tolist(), logps.tolist(), strict=True):
        ids, complete = cut_at_stop(model, generated)
        answers.append(SampledAnswer(ids=tuple(ids), logps=tuple(chances[: len(ids)]), complete=complete))
    return answers


def pack(groups: Sequence[Group], *, pad_id: int, multiple: int = 1) -> tuple[dict[str, Tensor], Int[Tensor, " M"]]:
    """Return fields of `Packed` with one row per group (its prefix is read once for all its rollouts), and the rollout that each of the M
    trainable tokens belongs to (counted through all groups), in the order of `loss_mask`. `multiple`: of which lengths are
    multiples."""
    rows = []
    for group in groups:
        row = pack_row(list(group.prefix), [([], [i for segment in rollout for i in segment.ids]) for rollout in group.rollouts])
        trainable = [segment.trainable for rollout in group.rollouts for segment in rollout for _ in segment.ids]
        rows.append(replace(row, learned=[False] * len(group.prefix) + trainable))
    fields = pad_rows(rows, pad_id=pad_id, multiple=multiple)
    first = torch.tensor([0, *(len(group.rollouts) for group in groups)]).cumsum(0)
    at, place = fields["loss_mask"].nonzero(as_tuple=True)
    return fields, first[at] + fields["branch"][at, place] - 1


def token_logps(
    model: Network, packed: Packed, hidden: Float[Tensor, "B L D"], reader: Reader, *, learn_entropy: bool = False
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Return the log-probability of every trainable token and the entropy in its place, which has a gradient if it is learned too."""

    def read(some: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logp = reader(model.logits(some)).log_softmax(dim=1)
        return logp.gather(1, ids[:, None])[:, 0], entropies(logp if learn_entropy else logp.detach())

    at, place = packed.loss_mask.nonzero(as_tuple=True)
    logps, entropy = in_pieces(read, hidden[at, place - 1], packed.input_ids[at, place], words=model.vocabulary)
    return logps, entropy


def entropies(logp: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    """Return the entropy of each row. A token with probability 0 adds nothing and gets no gradient."""
    return -(logp.exp() * logp.masked_fill(logp.isneginf(), 0.0)).sum(1)
