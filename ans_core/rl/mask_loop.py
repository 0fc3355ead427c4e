"""Loop 2: caption or expression -> masks -> captions'.

The policy tries G masks (`mask_policy`); the inverse model captions each of them. The loss adds the
supervised mask loss, and a KL that keeps the words around `[SEG]` close to the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.data.regions import is_region
from ans_core.dist import shared_mean
from ans_core.losses import mean_iou
from ans_core.rewards.confidence import MaskPrediction
from ans_core.rl import grpo
from ans_core.rl.asking import inverse_captions
from ans_core.rl.drawing import decode_seg, mask_loss, to_rle
from ans_core.rl.experience import Experience
from ans_core.rl.mask_policy import MaskSampling
from ans_core.rl.rollout import Group
from ans_core.rl.scoring import score
from ans_core.rl.step import Loop, RolloutStep
from ans_core.rl.tokens import group_of, hidden_states, referring_rollout


def policy_output(
    step: RolloutStep, groups: tuple[Group, ...]
) -> tuple[Float[Tensor, "B h w"], Float[Tensor, "M V"]]:
    """Return the logits of the masks that the active adapter draws for every sample's text, and its logits at
    the answers' tokens, which are given."""
    packed, hidden, _ = hidden_states(step, groups, [])
    decoded = decode_seg(step, packed, hidden)
    at, place = packed.loss_mask.nonzero(as_tuple=True)
    words = step.reader.guarded(step.model.logits(hidden[at, place - 1]))
    # DistributedDataParallel waits for a gradient of every trained parameter, and few losses use these two
    # heads.
    unread = 0.0 * (decoded.ious.sum() + decoded.object_score.sum())
    return decoded.logits + unread, words


def act(step: RolloutStep) -> Experience:
    s, exploration, policy = step.settings, step.exploration, step.mask_policy
    groups = tuple(
        group_of(step, i, [referring_rollout(step, text)]) for i, text in enumerate(step.batch.asked)
    )
    with step.timer.part("draw"):
        before, _ = policy_output(step, groups)
        spread = shared_mean(policy.spread(before), before.device)
        exploration.scale = spread if not exploration.scale else 0.9 * exploration.scale + 0.1 * spread
        acting = MaskSampling(
            width=exploration.width,
            scale=exploration.scale,
            generators=step.generators("mask actions"),
            group=s.group,
        )
        actions = policy.act(before, acting)
    masks = [to_rle(step, mask.float() - 0.5, i) for i, some in enumerate(actions.masks) for mask in some]
    texts = inverse_captions(step, masks)
    sure = actions.confidence.flatten().tolist()
    predictions = [
        MaskPrediction(text=t, masks=((m,),), confidence=c)
        for t, m, c in zip(texts, masks, sure, strict=True)
    ]
    rewards = score(step, predictions, s.rewards_mask)
    alike = grpo.group_overlap(actions.masks)
    metrics = {
        "group_pairwise_iou": shared_mean(float(alike.mean()), alike.device),
        "identical": shared_mean(float((alike == 1).float().mean()), alike.device),
        "sigma": exploration.width,
    }
    return Experience(
        groups=groups, regions=[], texts=texts, masks=masks, rewards=rewards, actions=actions, metrics=metrics
    )


def read_reference(step: RolloutStep, done: Experience) -> None:
    done.reference_masks, done.reference_words = policy_output(step, done.groups)


def learn(step: RolloutStep, done: Experience) -> tuple[Float[Tensor, ""], dict[str, float]]:
    s, policy, batch = step.settings, step.mask_policy, step.batch
    assert done.actions is not None, "a mask loop without actions"
    assert done.advantage is not None, "advantages come before learning"
    reference, reference_words = done.reference_masks, done.reference_words
    assert reference is not None, "the reference reads before the policy learns"
    assert reference_words is not None, "the reference reads before the policy learns"
    logits, words = policy_output(step, done.groups)
    logps = policy.log_prob(logits, done.actions).flatten()
    if done.behaviour is None:
        done.behaviour = logps.detach()
    each = torch.arange(len(logps), device=logps.device)
    objective = replace(step.objective, max_tokens=1)
    totals = replace(step.totals, tokens=step.totals.answers)  # an answer is one action
    # of the step's samples: the losses below are means over this batch
    share = len(done.groups) / totals.samples
    loss, metrics = grpo.policy_loss(
        logps,
        done.behaviour,
        done.advantage.to(logps.device).flatten(),
        each,
        objective,
        answers=len(logps),
        totals=totals,
    )
    kl = policy.kl(logits, reference, done.actions)
    words_kl = grpo.exact_kl(words, reference_words) / len(done.groups)
    supervised = (
        mask_loss(step, logits, batch.targets, range(len(batch.samples)))
        if s.mask_weight
        else loss.new_zeros(())
    )
    metrics |= {"kl": float(kl.detach()), "words_kl": float(words_kl.detach())}
    if known_masks := [i for i, sample in enumerate(batch.samples) if sample.masks]:
        metrics["iou_mean"] = float(mean_iou(logits.detach()[known_masks], batch.targets[known_masks]))
    return loss + share * (s.kl * kl + s.kl_words * words_kl + s.mask_weight * supervised), metrics


LOOP = Loop(
    prefix="loop2",
    takes=is_region,
    wants="region captions (an image, one mask, its caption)",
    decodes_masks=True,
    acts_together=False,  # how far it explores follows from each micro-batch's spread
    rewards=lambda settings: settings.rewards_mask,
    judged=lambda settings: settings.use_llm_judge_loop2,
    act=act,
    read_reference=read_reference,
    learn=learn,
)
