"""Expressions -> answers that draw what is meant, or deny that it is there; scored as gRefCOCO scores them.

Two things are sampled. The words: whether there is something to draw. And, with `rl.place`, where: a cell of the picture, by the logits of
the mask that the answer's `[SEG]` draws; what is drawn is then what a click there gives, so a group can try other things. Expressions that
mean several things, or nothing, leave the mask to `[SEG]`: one click draws one thing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ans_core import rle
from ans_core.benchmarks import referring
from ans_core.benchmarks.score import meant
from ans_core.model.packing import Packed
from ans_core.rl import grpo
from ans_core.rl.mask_policy import Place
from ans_core.rl.rollout import token_logps
from ans_core.rl.step import Experience, Loop, RolloutStep
from ans_core.rl.text_loop import experience_of, words_loss
from ans_core.types import RLE, Prediction, Sample

NOWHERE = -1
"""In place of a cell, of an answer that is not drawn by a click."""


def act(step: RolloutStep) -> Experience:
    samples, group = step.batch.samples, step.settings.group
    requests = [referring.request(sample) for sample in samples]
    done = experience_of(step, requests, step.sample_answers(requests, "answers"))
    drawn = step.drawn(done.groups)
    nothing = [rle.empty(sample.height, sample.width) for sample in samples]
    # As in the benchmark, only an answer's first mask counts.
    done.masks = [masks[0] if masks else nothing[i // group] for i, masks in enumerate(drawn)]
    if step.settings.place:
        _click(step, done)
    answers = [Prediction(text=text, masks=((mask,),)) for text, mask in zip(done.texts, done.masks, strict=True)]
    truths = [Prediction(text=sample.text, masks=((target(sample),),)) for sample in samples]
    done.rewards = step.score(answers, step.settings.rewards_refer, truths)
    for name, absent in (("denied_if_absent", True), ("denied_if_there", False)):
        if denied := [not masks for i, masks in enumerate(drawn) if bool(samples[i // group].masks) != absent]:
            done.metrics[name] = sum(denied) / len(denied)
    return done


def target(sample: Sample) -> RLE:
    """Return everything that the expression means as one mask; empty if nothing fits."""
    mask = meant(sample, 0)
    assert mask is not None, f"{sample.sample_id}: `takes` lets no sample in whose first frame is not annotated"
    return mask


# Where


def places(
    step: RolloutStep, packed: Packed, hidden: Float[Tensor, "B L D"], rollout: Int[Tensor, " M"]
) -> tuple[Int[Tensor, " P"], Float[Tensor, "P K"], Bool[Tensor, " P"]]:
    """Return the answers that draw one thing, the log-probability of every cell for each, and whether its mask is shown."""
    answers, logits, shown = step.first_masks(packed, hidden, rollout)
    single = torch.tensor([len(sample.masks) == 1 for sample in step.batch.samples], device=answers.device)
    kept = single[answers // step.settings.group]
    return answers[kept], Place(step.settings.mask_grid).log_probs(logits[kept], step.settings.place_width), shown[kept]


@torch.no_grad()
def _click(step: RolloutStep, done: Experience) -> None:
    """Sample a cell for every answer that draws one thing, and put what a click there draws in the place of its mask."""
    group, place = step.settings.group, Place(step.settings.mask_grid)
    with step.timer.part("draw"):
        answers, logps, shown = places(step, *step.hidden(done.groups, done.regions))
        answers, logps = answers[shown], logps[shown]  # nothing is clicked where the model sees nothing
        done.cells = torch.full((len(done.groups), group), NOWHERE, device=logps.device)
        if not len(answers):
            return
        generators = [torch.Generator(logps.device).manual_seed(step.seed("place", *divmod(answer, group))) for answer in answers.tolist()]
        cells = torch.cat([torch.multinomial(row, 1, generator=own) for row, own in zip(logps.exp(), generators, strict=True)])
        done.cells.view(-1)[answers] = cells
        for answer, z in zip(answers.tolist(), step.decode(step.click(place.middles(cells)), answers // group), strict=True):
            done.masks[answer] = step.rle(z, answer // group)


def read_reference(step: RolloutStep, done: Experience) -> dict[str, Tensor]:
    packed, hidden, rollout = step.hidden(done.groups, done.regions)
    known = {"reference": token_logps(step.model, packed, hidden, step.reader)[0]}
    if done.cells is not None:
        known["places"] = places(step, packed, hidden, rollout)[1]
    return known


def learn(step: RolloutStep, done: Experience) -> tuple[Float[Tensor, ""], dict[str, float]]:
    read = step.hidden(done.groups, done.regions)
    loss, metrics = words_loss(step, done, *read)
    if done.cells is None:
        return loss, metrics
    placed, found = _place_loss(step, done, *read)
    return loss + step.settings.place * placed, metrics | found


def _place_loss(
    step: RolloutStep, done: Experience, packed: Packed, hidden: Float[Tensor, "B L D"], rollout: Int[Tensor, " M"]
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Return GRPO's loss of the cells that were clicked, one action an answer, with the KL of all cells to the reference; and metrics."""
    s, known = step.settings, done.known
    assert done.advantage is not None, "advantages come before learning"
    assert done.cells is not None, "cells are sampled before they are learned from"
    answers, every, _ = places(step, packed, hidden, rollout)
    cells = done.cells.to(answers.device).flatten()[answers]
    clicked = cells != NOWHERE
    logps = every[clicked].gather(1, cells[clicked][:, None])[:, 0]
    loss, _ = grpo.policy_loss(
        logps,
        known.setdefault("places_behaviour", logps.detach()),
        done.advantage.to(logps.device).flatten()[answers[clicked]],
        torch.arange(len(logps), device=logps.device),
        replace(step.objective, max_tokens=1),
        answers=len(logps),
        totals=replace(step.totals, tokens=step.totals.answers),
    )
    kl = F.kl_div(known["places"], every, log_target=True, reduction="sum")
    metrics = {"clicked": len(logps) / len(done.texts)}
    if len(every):
        metrics |= {"place_kl": float(kl.detach()) / len(every), "place_entropy": float(-(every.exp() * every).detach().sum(1).mean())}
    return loss + s.kl * kl / step.totals.answers, metrics


LOOP = Loop(
    prefix="refer",
    takes=lambda sample: sample.task == "referring" and len(sample.frames) == 1 and meant(sample, 0) is not None,
    wants="referring expressions in pictures",
    decodes_masks=True,
    rewards=lambda settings: settings.rewards_refer,
    act=act,
    read_reference=read_reference,
    learn=learn,
)
