"""Rollouts as segments: sampled from the model, and read again as log-probabilities. Both use the same
`Reader`.

A rollout is a list of segments. Each is either sampled from the policy (trainable) or given to it: a
question, a forced answer, a tool's reply.
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

from ans_core.data.collate import pack_row, pad_rows
from ans_core.inference.decoding import decode
from ans_core.inference.generation import cut_at_stop, stopping
from ans_core.inference.prefill import PrefilledBatch
from ans_core.model.checkpointing import in_pieces
from ans_core.model.compiling import compiled_function
from ans_core.model.network import Network
from ans_core.model.packing import Packed

Guard = Literal["guard", "clip"]
"""guard: replace and count logits that are not finite, leave others alone. clip: also clamp to +-30, which
removes the gradient of every token beyond (logits 35, 28, -40 give log p = -0.13 for the first instead of
-0.0009)."""

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
    """The G rollouts of one sample, which share a prefix: the picture and the question without its last
    token.

    Each rollout holds that last token itself, because it predicts the first token of the answer.
    """

    prefix: tuple[int, ...]
    rollouts: tuple[Rollout, ...]


class Reader:
    """Turn raw logits into the logits of the distribution that the policy samples from.

    Sampling and log-probabilities both use it: a step that only one of them took would make the behaviour
    policy differ from the learned one. top_p is 1: tokens of a cut tail would have no log-probability.
    """

    def __init__(self, *, temperature: float, forbidden: Sequence[int], guard: Guard) -> None:
        self.temperature, self.guard = temperature, guard
        self.forbidden = torch.tensor(list(forbidden), dtype=torch.long)
        """Token ids that are never sampled: the image slot, which no picture would fill when the answer is
        read again."""
        self._nonfinite = torch.zeros((), dtype=torch.long)

    @property
    def nonfinite(self) -> int:
        """Logits replaced so far; they are counted where they are computed, and looking reads the device."""
        return int(self._nonfinite)

    @nonfinite.setter
    def nonfinite(self, count: int) -> None:
        self._nonfinite.fill_(count)

    def __call__(self, raw: Float[Tensor, "M V"]) -> Float[Tensor, "M V"]:
        """Apply guard, temperature and forbidden tokens in fp32: bf16 logits alone put 5 % of noise on a
        ratio."""
        logits = self.guarded(raw) / self.temperature
        return logits.index_fill(1, self.forbidden, -torch.inf)

    def guarded(self, raw: Float[Tensor, "M V"]) -> Float[Tensor, "M V"]:
        """Return finite logits with nothing forbidden, at temperature 1: for tokens that are given."""
        self.forbidden, self._nonfinite = self.forbidden.to(raw.device), self._nonfinite.to(raw.device)
        logits = raw.float()
        bad = ~logits.detach().isfinite()
        self._nonfinite.add_(bad.sum())
        logits = torch.where(
            bad, torch.nan_to_num(logits.detach(), nan=-REPLACED, posinf=REPLACED, neginf=-REPLACED), logits
        )
        return logits.clamp(-CLIP, CLIP) if self.guard == "clip" else logits


class _Sampling:
    """Sample from softmax(logits) as argmax(logits + Gumbel noise), and keep each token's log-probability.

    The noise is a function of the row's seed, the token's number and the word: of neither the other rows, nor
    the process, nor the device.
    """

    def __init__(
        self,
        reader: Reader,
        seeds: Sequence[int],
        *,
        words: int,
        max_tokens: int,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self.reader = reader
        self.words = torch.arange(words, device=device)
        self.noise = compiled_function(gumbel, on=compiled)
        self.seeds = torch.tensor(list(seeds), device=device)
        self.logps = torch.zeros(len(seeds), max_tokens, device=device)

    def __call__(self, raw: Float[Tensor, "R V"], count: Int[Tensor, " 1"]) -> Int[Tensor, " R"]:
        logits = self.reader(raw)
        token = (logits + self.noise(self.seeds, count, self.words)).argmax(1)
        self.logps.index_copy_(1, count, logits.log_softmax(1).gather(1, token[:, None]))
        return token


def gumbel(
    seeds: Int[Tensor, " R"], count: Int[Tensor, " 1"], words: Int[Tensor, " V"]
) -> Float[Tensor, "R V"]:
    """Return standard Gumbel noise -ln(-ln(1 - u)), where u is uniform and a hash of (seed, count, word): the
    outputs of SplitMix64 (Steele, Lea and Flood 2014), started for each seed and token at a place that it
    chooses, too."""
    start = _mixed(_mixed(seeds) + (count + 1) * GAMMA)  # (R,)
    bits = _mixed(start[:, None] + (words + 1) * GAMMA)  # (R, V)
    uniform = (_shifted(bits, 24).float() + 0.5) * 2.0**-40  # 40 bits, of which fp32 keeps the first 24
    return -(-torch.log1p(-uniform)).log()


GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def _mixed(bits: Int[Tensor, ...]) -> Int[Tensor, ...]:
    """SplitMix64's finalizer, in 64-bit integers that wrap around."""
    for shift, factor in MIX:
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Int[Tensor, ...], by: int) -> Int[Tensor, ...]:
    """Shift to the right without the sign."""
    return (bits >> by) & (2 ** (64 - by) - 1)


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
            return F.linear(input.float(), self.weight, self.bias)


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
    """Make the model's head compute in fp32 under autocast, for sampling and learning alike: logits rounded
    to bf16 change a log-probability by 0.1. A head in half precision, as SFT leaves it that passes its base
    through, is cast once; an embedding that shares its weight keeps its own dtype."""
    head = model.vlm.lm_head
    # it is one: another class around it would be called, too
    if isinstance(head, _Fp32Head) or getattr(type(head), "exact", False):
        return
    if isinstance(head, nn.Linear):
        for name, p in list(head.named_parameters()):
            if p.dtype != torch.float32:  # head.float() would cast what shares it, too
                setattr(head, name, nn.Parameter(p.detach().float(), requires_grad=p.requires_grad))
        head.__class__ = _Fp32Head
    else:
        head.__class__ = _in_fp32(type(head.float()))  # type: ignore[arg-type]


@torch.no_grad()
def sample(
    model: Network,
    prompted: PrefilledBatch,
    *,
    group: int,
    max_tokens: int,
    reader: Reader,
    seeds: Sequence[int],
) -> list[SampledAnswer]:
    """Sample `group` answers for each of the B requests, in request order; `seeds` has one seed per answer (B
    x group)."""
    sampling = _Sampling(
        reader,
        seeds,
        words=model.vocabulary,
        max_tokens=max_tokens,
        device=model.device,
        compiled=model.compiled,
    )
    out = decode(model, prompted, answers=group, max_tokens=max_tokens, choose=sampling, **stopping(model))
    answers = []
    for generated, chances in zip(out.tolist(), sampling.logps.tolist(), strict=True):
        ids, complete = cut_at_stop(model, generated)
        answers.append(SampledAnswer(ids=tuple(ids), logps=tuple(chances[: len(ids)]), complete=complete))
    return answers


def pack(
    groups: Sequence[Group], *, pad_id: int, multiple: int = 1
) -> tuple[dict[str, Tensor], Int[Tensor, " M"]]:
    """Return fields of `Packed` with one row per group (its prefix is read once for all its rollouts), and
    the rollout that each of the M trainable tokens belongs to (counted through all groups), in the order of
    `loss_mask`. `multiple`: of which lengths are multiples."""
    rows = []
    for group in groups:
        row = pack_row(
            list(group.prefix),
            [([], [i for segment in rollout for i in segment.ids]) for rollout in group.rollouts],
        )
        trainable = [
            segment.trainable for rollout in group.rollouts for segment in rollout for _ in segment.ids
        ]
        rows.append(replace(row, learned=[False] * len(group.prefix) + trainable))
    fields = pad_rows(rows, pad_id=pad_id, multiple=multiple)
    first = torch.tensor([0, *(len(group.rollouts) for group in groups)]).cumsum(0)
    at, place = fields["loss_mask"].nonzero(as_tuple=True)
    return fields, first[at] + fields["branch"][at, place] - 1


def token_logps(
    model: Network,
    packed: Packed,
    hidden: Float[Tensor, "B L D"],
    reader: Reader,
    *,
    learn_entropy: bool = False,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Return the log-probability of every trainable token and the entropy in its place, which has a gradient
    if it is learned too."""

    def read(some: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logp = reader(model.logits(some)).log_softmax(dim=1)
        return logp.gather(1, ids[:, None])[:, 0], entropies(logp if learn_entropy else logp.detach())

    at, place = packed.loss_mask.nonzero(as_tuple=True)
    logps, entropy = in_pieces(
        read, hidden[at, place - 1], packed.input_ids[at, place], words=model.vocabulary
    )
    return logps, entropy


def entropies(logp: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    """Return the entropy of each row. A token with probability 0 adds nothing and gets no gradient."""
    return -(logp.exp() * logp.masked_fill(logp.isneginf(), 0.0)).sum(1)
