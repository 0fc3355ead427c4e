"""Expressions -> answers that draw what is meant, or deny that it is there; scored as gRefCOCO scores them.

Two things are sampled. The words: whether there is something to draw. And, with `rl.place`, which thing: the
mask policy `Place` clicks where the logits of the answer's own mask are high, so a group can try other
things. Expressions that mean several things, or nothing, leave the mask to `[SEG]`: one click draws one
thing. As in loop 2 the loss then adds the supervised mask loss, without which masks drift.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ans_core.benchmarks import referring
from ans_core.benchmarks.score import meant
from ans_core.metrics.mask import pairwise_iou
from ans_core.model.packing import Packed
from ans_core.pictures import rle
from ans_core.rl import grpo
from ans_core.rl.asking import sample_answers
from ans_core.rl.drawing import (
    click_embeddings,
    decode_embeddings,
    draw_answers,
    first_masks,
    mask_loss,
    to_rle,
)
from ans_core.rl.experience import Experience
from ans_core.rl.mask_policy import SAME_THING, MaskActions, MaskSampling, Place
from ans_core.rl.scoring import score
from ans_core.rl.step import Loop, RolloutStep
from ans_core.rl.text_loop import experience_of, read_reference, words_loss
from ans_core.rl.tokens import hidden_states
from ans_core.types import RLE, Prediction, Sample

PLACE = Place()
NOWHERE = -1
"""In place of a pixel, of an answer that nothing is clicked for."""


def act(step: RolloutStep) -> Experience:
    samples, group = step.batch.samples, step.settings.group
    requests = [referring.request(sample) for sample in samples]
    done = experience_of(step, requests, sample_answers(step, requests, "answers"))
    drawn = draw_answers(step, done.groups)
    nothing = [rle.empty(sample.height, sample.width) for sample in samples]
    # As in the benchmark, only an answer's first mask counts.
    done.masks = [masks[0] if masks else nothing[i // group] for i, masks in enumerate(drawn)]
    if step.settings.place:
        _click(step, done)
    answers = [
        Prediction(text=text, masks=((mask,),)) for text, mask in zip(done.texts, done.masks, strict=True)
    ]
    truths = [Prediction(text=sample.text, masks=((target(sample),),)) for sample in samples]
    done.rewards = score(step, answers, step.settings.rewards_refer, truths)
    for name, absent in (("denied_if_absent", True), ("denied_if_there", False)):
        if denied := [
            not masks for i, masks in enumerate(drawn) if bool(samples[i // group].masks) != absent
        ]:
            done.metrics[name] = sum(denied) / len(denied)
    return done


def target(sample: Sample) -> RLE:
    """Return everything that the expression means as one mask; empty if nothing fits."""
    mask = meant(sample, 0)
    assert mask is not None, (
        f"{sample.sample_id}: `takes` lets no sample in whose first frame is not annotated"
    )
    return mask


# Where


def single_things(
    step: RolloutStep, packed: Packed, hidden: Float[Tensor, "B L D"], rollout: Int[Tensor, " M"]
) -> tuple[Int[Tensor, " P"], Float[Tensor, "P h w"], Bool[Tensor, " P"]]:
    """Return the answers that draw one thing, the logits of their masks, and whether these are shown."""
    answers, logits, shown = first_masks(step, packed, hidden, rollout)
    single = torch.tensor([len(sample.masks) == 1 for sample in step.batch.samples], device=answers.device)
    kept = single[answers // step.settings.group]
    return answers[kept], logits[kept], shown[kept]


@torch.no_grad()
def _click(step: RolloutStep, done: Experience) -> None:
    """Sample which thing to draw for every answer that draws one, and put its mask in the place of the
    answer's."""
    group, width = step.settings.group, step.settings.place_width
    with step.timer.part("draw"):
        answers, logits, shown = single_things(step, *hidden_states(step, done.groups, done.regions))
        answers, logits = answers[shown], logits[shown]  # nothing is clicked where the model sees nothing
        seeds = [step.seed("place", *divmod(answer, group)) for answer in answers.tolist()]
        count, (height, wide) = len(done.texts), logits.shape[-2:]
        choice = answers.new_full((count, 1), NOWHERE)
        masks = torch.zeros(count, 1, height, wide, dtype=torch.bool, device=answers.device)
        if len(answers):
            sampling = MaskSampling(
                width=width,
                scale=1.0,
                generators=[torch.Generator(answers.device).manual_seed(seed) for seed in seeds],
                group=1,
                decode=lambda embeddings: decode_embeddings(step, embeddings, answers // group),
                click=lambda at: click_embeddings(step, at),
            )
            tried = PLACE.draw(logits, sampling)
            choice[answers], masks[answers] = tried.choice, tried.masks
    for answer in answers.tolist():
        done.masks[answer] = to_rle(step, masks[answer, 0].float() - 0.5, answer // group)
    done.actions = MaskActions(
        choice=choice.view(-1, group), masks=masks.view(-1, group, height, wide), scale=1.0, width=width,
        confidence=torch.zeros(len(done.groups), group, device=answers.device),
    )  # fmt: skip


def learn(step: RolloutStep, done: Experience) -> tuple[Float[Tensor, ""], dict[str, float]]:
    read = hidden_states(step, done.groups, done.regions)
    loss, metrics = words_loss(step, done, *read)
    if done.actions is None:
        return loss, metrics
    placed, found = _place_loss(step, done, done.actions, *read)
    return loss + step.settings.place * placed, metrics | found


def _place_loss(
    step: RolloutStep,
    done: Experience,
    actions: MaskActions,
    packed: Packed,
    hidden: Float[Tensor, "B L D"],
    rollout: Int[Tensor, " M"],
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Return GRPO's loss of the things that were drawn, one action an answer, and the supervised mask loss;
    and metrics."""
    s = step.settings
    assert done.advantage is not None, "advantages come before learning"
    answers, logits, _ = single_things(step, packed, hidden, rollout)
    every = MaskActions(
        choice=actions.choice.view(-1, 1), masks=actions.masks.flatten(0, 1)[:, None],
        confidence=actions.confidence.view(-1, 1), scale=actions.scale, width=actions.width,
    )  # fmt: skip
    tried = every.choice[answers, 0] != NOWHERE
    logps = PLACE.drawn(logits[tried], every.take(answers[tried]))[:, 0]
    if done.behaviour_places is None:
        done.behaviour_places = logps.detach()
    loss, _ = grpo.policy_loss(
        logps,
        done.behaviour_places,
        done.advantage.to(logps.device).flatten()[answers[tried]],
        torch.arange(len(logps), device=logps.device),
        replace(step.objective, max_tokens=1),
        answers=len(logps),
        totals=replace(step.totals, tokens=step.totals.answers),
    )
    metrics = {"clicked": len(logps) / len(done.texts)}
    if len(logps):
        own = (logits[tried] > 0).detach()
        other = pairwise_iou(own[:, None], every.masks[answers[tried]])[:, 0, 0] < SAME_THING
        metrics["another_thing"] = float(other.float().mean())
    if s.mask_weight and len(answers):
        of = answers // s.group
        first = torch.ones_like(of, dtype=torch.bool)
        first[1:] = of[1:] != of[:-1]
        chosen = of[first].tolist()
        share = len(chosen) / step.totals.samples
        loss = loss + share * s.mask_weight * mask_loss(
            step, logits[first], step.batch.targets[chosen], chosen
        )
    return loss, metrics


LOOP = Loop(
    prefix="refer",
    takes=lambda sample: (
        sample.task == "referring" and len(sample.frames) == 1 and meant(sample, 0) is not None
    ),
    wants="referring expressions in pictures",
    decodes_masks=True,
    rewards=lambda settings: settings.rewards_refer,
    act=act,
    read_reference=read_reference,
    learn=learn,
)
