"""What the stage rl practises: each loop's samples, and the batches of a step."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ans_core import dist
from ans_core.config import Config, Rl
from ans_core.data.collate import Batch, LeftOut, collate_readable
from ans_core.data.left_out import STAND_INS, LeftOutFile, first_readable
from ans_core.data.mixture import Source
from ans_core.data.selection import Expressions, Joined, Selected, unnamed
from ans_core.model.network import Network
from ans_core.rewards import MASKLESS, WORDLESS
from ans_core.rl.batch import RlBatch, rl_batch
from ans_core.rl.dual_loop import LOOPS, Batches
from ans_core.stages.supervision import mixture_of, sft_layout
from ans_core.types import Sample

PHRASES_NEED = (
    "`ans data draw` gives them masks to learn from; for loop 2 itself rl.loops must have 'mask', "
    "rl.rewards_mask nothing that reads a mask, rl.mask_weight 0, and no judge for loop 2"
)


@dataclass(frozen=True, kw_only=True)
class LoopSamples:
    """Samples by loop; loops that take the same samples share them."""

    samples: list[Selected]
    of: dict[str, int]


def compares_words(settings: Rl) -> bool:
    """Tell whether a reward of loop 1, be its weight 0, reads the true caption."""
    return settings.use_llm_judge or not set(settings.rewards_caption) <= WORDLESS


def compares_masks(settings: Rl) -> bool:
    """Tell whether a reward of loop 2, be its weight 0, or its loss reads the true mask. (The judge has
    questions about captions of known regions alone.)"""
    return (
        settings.use_llm_judge_loop2 or settings.mask_weight > 0 or not set(settings.rewards_mask) <= MASKLESS
    )


def samples_by_loop(
    samples: Joined,
    loops: Collection[str],
    *,
    absent: float = 0.0,
    wordless: bool = False,
    maskless: bool = False,
) -> LoopSamples:
    """Select each loop's samples; of the loop refer's, the share `absent` has nothing to draw. `wordless`:
    the loop caption also takes masks that no caption is known for. `maskless`: the loop mask also takes
    captions that no mask is known for. Raises ValueError for a loop without samples in the data."""
    chosen: dict[tuple[Callable[[Sample], bool], str], int] = {}
    phrases = Selected(samples, samples.where(lambda sample: sample.task == "phrase"))
    unpaired: dict[str, Selected] = {}
    if wordless and "caption" in loops and samples.unnamed.any():
        unpaired["caption"] = unnamed(samples)
    if maskless and "mask" in loops and len(phrases):
        unpaired["mask"] = phrases
    if len(phrases) and "mask" not in unpaired:
        logging.warning("%d texts without masks are not used: %s", len(phrases), PHRASES_NEED)
    found = LoopSamples(samples=[], of={})
    for name in loops:
        takes, more = LOOPS[name].takes, unpaired.get(name)
        key = takes, name if more is not None else ""
        if key not in chosen:
            chosen[key] = len(found.samples)
            taken = Selected(samples, samples.where(takes))
            taken = taken if more is None else taken + more
            found.samples.append(with_absent(taken, absent) if name == "refer" else taken)
        found.of[name] = chosen[key]
        if not len(found.samples[chosen[key]]):
            raise ValueError(
                f"rl.loops has {name!r}, which needs {LOOPS[name].wants}; prepare.sources or prepare.scenes "
                "give none for training"
            )
    return found


def with_absent(samples: Selected, share: float) -> Selected:
    """Repeat the samples without an object, or leave some of them out, until they are this share of all;
    samples without any such stay, and a warning says so."""
    has_masks = np.isin(samples.numbers, samples.joined.where(lambda sample: bool(sample.masks)))
    there, silent = samples.numbers[has_masks], samples.numbers[~has_masks]
    if share and len(there) and not len(silent):
        warnings.warn(
            f"rl.absent is {share:g}, but no expression of the training data names an absent thing: the "
            "loop refer never practises to deny. gRefCOCO has some (format grefcoco in prepare.sources), "
            "drawn scenes too; rl.absent=0 leaves this line out",
            stacklevel=2,
        )
    wanted = round(len(there) * share / (1 - share)) if len(silent) else 0
    return Selected(samples.joined, np.concatenate([there, np.resize(silent, wanted)]))


def rows_of_sft(
    cfg: Config, sources: Sequence[Source], model: Network, left_out: LeftOutFile
) -> Callable[[int, int], Batch]:
    """Return (step, micro-batch) -> this process's rows of SFT's mixture, without those that can't be read.
    Raises ValueError where a micro-batch would have none."""
    s, seed = cfg.rl, dist.seed_of(cfg.seed, "rl rows")
    if s.rows < (least := s.optim.accumulate * dist.world_size()):
        raise ValueError(
            f"rl.rows is {s.rows}: {dist.world_size()} processes with {s.optim.accumulate} micro-batches "
            f"each need {least}"
        )
    mixture = mixture_of(cfg, sources, seed=seed)
    layout = sft_layout(cfg, model)

    def make(step: int, micro: int) -> Batch:
        rows = mixture.rows(step, micro, batch=s.rows, micros=s.optim.accumulate)
        batch, samples = collate_readable(rows, model.tokenizer, layout)
        left_out.add(step, samples)
        return batch

    return make


class RolloutBatches:
    """(step, micro-batch) -> this process's samples of every loop."""

    def __init__(
        self,
        cfg: Config,
        practice: LoopSamples,
        model: Network,
        joined: Joined,
        left_out: LeftOutFile,
        rows: Callable[[int, int], Batch] | None = None,
    ) -> None:
        """rows: (step, micro-batch) -> this process's rows of SFT's mixture, beside the samples."""
        self.cfg, self.practice, self.model, self.left_out, self.rows = cfg, practice, model, left_out, rows
        self.expressions = [Expressions(samples, joined) for samples in practice.samples]
        """Expressions for the samples of loop 2; empty for samples of other loops."""

    def __call__(self, step: int, micro: int) -> Batches:
        s = self.cfg.rl
        rollout = step // s.inner_steps
        share = {"micro": micro, "micros": s.optim.accumulate}
        return Batches(
            batches=[self._batch(kind, step, share) for kind in range(len(self.practice.samples))],
            of=self.practice.of,
            learned=len(dist.own_share(range(s.optim.batch), **share)),
            rollout=rollout,
            micro=micro,
            inner=step % s.inner_steps,
            step=step,
            rows=self.rows(step, micro) if self.rows is not None else None,
        )

    def _batch(self, kind: int, step: int, share: dict[str, int]) -> RlBatch:
        cfg, s, samples = self.cfg, self.cfg.rl, self.practice.samples[kind]
        rollout = step // s.inner_steps
        rows = rows_of(len(samples), rollout, batch=s.rolled_out, seed=cfg.seed)
        own = dist.own_share(list(zip(rows, repeats_of([samples[i] for i in rows]), strict=True)), **share)
        try:
            return self._read(kind, step, own)
        except ValueError:
            return self._read(kind, step, self._readable(kind, step, own))

    def _read(self, kind: int, step: int, own: Sequence[tuple[int, int]]) -> RlBatch:
        """Read samples and choose what they are asked. own: index of the sample, and how often it stands in
        the step before."""
        cfg, s, samples = self.cfg, self.cfg.rl, self.practice.samples[kind]
        rollout, asked = step // s.inner_steps, []
        for i, repeat in own:
            rng = dist.rng_of(
                cfg.seed,
                "rl asked",
                rollout,
                samples[i].dataset,
                samples[i].sample_id,
                *([repeat] if repeat else []),
            )
            others = self.expressions[kind][i]
            asked.append(rng.choice(others) if others and rng.random() < s.expressions else samples[i].text)
        repeats = [repeat for _, repeat in own]
        return rl_batch(
            [samples[i] for i, _ in own],
            asked,
            self.model,
            mask_size=cfg.sft.mask_size,
            repeats=repeats,
        )

    def _readable(self, kind: int, step: int, own: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Put another sample in the place of each that can't be read, and write down which these are. Raises
        ValueError if none of STAND_INS can be read either."""
        samples, found, left_out = self.practice.samples[kind], list[tuple[int, int]](), list[LeftOut]()

        def name(i: int) -> str:
            return f"{samples[i].dataset}/{samples[i].sample_id}"

        def read(i: int) -> RlBatch:
            return rl_batch([samples[i]], [samples[i].text], self.model, mask_size=self.cfg.sft.mask_size)

        for i, repeat in own:
            rng = dist.rng_of(self.cfg.seed, "rl stand-in", step // self.cfg.rl.inner_steps, name(i), repeat)
            others = (rng.randrange(len(samples)) for _ in range(STAND_INS))
            chosen, _, broken = first_readable(chain([i], others), read, name=name, stage="rl")
            # its seeds are those of no other place in the step
            found.append((chosen, self.cfg.rl.rolled_out * (i + 1) + repeat if broken else repeat))
            left_out += broken[:1]
        self.left_out.add(step, left_out)
        return found


def repeats_of(samples: Sequence[Sample]) -> list[int]:
    """Return of every sample how often it stands before its place."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for sample in samples:
        name = sample.dataset, sample.sample_id
        found.append(seen[name])
        seen[name] += 1
    return found


def rows_of(count: int, step: int, *, batch: int, seed: int) -> list[int]:
    """Return the indices of a step's samples: shuffled epochs, decided by (seed, step) alone."""
    numbers = range(step * batch, (step + 1) * batch)
    return [dist.in_epochs(number, count, seed, "rl epoch") for number in numbers]
