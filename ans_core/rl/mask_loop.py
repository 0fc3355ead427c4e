"""Loop 2: caption or expression -> masks -> captions'. The policy draws what it reads and explores around it (`mask_policy`); the inverse
model tells what is in each mask. Beside it the supervised mask loss, and the words around `[SEG]` held to the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.data.regions import is_region
from ans_core.dist import seed_everything, shared_mean
from ans_core.losses import mask_losses, mean_iou
from ans_core.rewards.confidence import Drawing
from ans_core.rl import grpo
from ans_core.rl.mask_policy import Acting, Drawn
from ans_core.rl.rollout import Group
from ans_core.rl.round import Experience, Loop, Round


def drawn(round: Round, groups: tuple[Group, ...]) -> tuple[Drawn, Float[Tensor, "M V"]]:
    """What the active adapter draws for every sample's text, and its logits of the answers' tokens, which are given."""
    packed, hidden, rollout = round.hidden(groups, [])
    embeddings, decoded = round.decoded(packed, hidden)
    at, place = packed.loss_mask.nonzero(as_tuple=True)
    words = round.reader.guarded(round.model.logits(hidden[at, place - 1]))
    logp = words.log_softmax(1).gather(1, packed.input_ids[at, place][:, None])[:, 0]
    total = torch.zeros(len(groups), device=logp.device).index_add(0, rollout, logp)
    # DistributedDataParallel waits for a gradient of all that is trained, and few losses read these two heads.
    unread = 0.0 * (decoded.ious.sum() + decoded.object_score.sum())
    what = Drawn(
        embeddings=embeddings.float(),
        logits=decoded.logits + unread,
        choices=decoded.all_logits,
        ious=decoded.ious.float(),
        words=total / rollout.bincount(minlength=len(groups)),
    )
    return what, words


def act(round: Round) -> Experience:
    s, exploring, policy = round.settings, round.exploring, round.mask_policy
    groups = tuple(round.group_of(i, [round.asked_for(text)]) for i, text in enumerate(round.batch.asked))
    with round.clock.part("draw"):
        before, _ = drawn(round, groups)
        spread = shared_mean(policy.spread(before), before.logits.device)
        exploring.scale = spread if not exploring.scale else 0.9 * exploring.scale + 0.1 * spread
        acting = Acting(
            width=exploring.width,
            scale=exploring.scale,
            generators=round.generators("mask actions"),
            group=s.group,
            decode=lambda embeddings: round.decode(embeddings, each=s.group),
        )
        actions = policy.act(before, acting)
    masks = [round.rle(mask.float() - 0.5, i) for i, some in enumerate(actions.masks) for mask in some]
    texts = round.captions(masks)
    sure = actions.confidence.flatten().tolist()
    drawings = [Drawing(text=t, masks=((m,),), confidence=c) for t, m, c in zip(texts, masks, sure, strict=True)]
    rewards = round.score(drawings, s.rewards_mask)
    alike = grpo.pairwise_iou(actions.masks)
    metrics = {
        "group_pairwise_iou": shared_mean(float(alike.mean()), alike.device),
        "identical": shared_mean(float((alike == 1).float().mean()), alike.device),
        "sigma": exploring.width,
    }
    return Experience(groups=groups, regions=[], texts=texts, masks=masks, rewards=rewards, actions=actions, metrics=metrics)


def refer(round: Round, done: Experience) -> dict[str, Tensor]:
    what, words = drawn(round, done.groups)
    return {**vars(what), "said": words}


def learn(round: Round, done: Experience) -> tuple[Float[Tensor, ""], dict[str, float]]:
    s, policy, batch, known = round.settings, round.mask_policy, round.batch, done.known
    assert done.actions is not None, "a mask loop without actions"
    assert done.advantage is not None, "advantages come before learning"
    what, words = drawn(round, done.groups)
    reference = Drawn(**{name: known[name] for name in Drawn.__dataclass_fields__})
    logps = policy.log_prob(what, done.actions).flatten()
    behaviour = known.setdefault("behaviour", logps.detach())
    each = torch.arange(len(logps), device=logps.device)
    objective = replace(round.objective, max_tokens=1)
    loss, metrics = grpo.policy_loss(
        logps, behaviour, done.advantage.to(logps.device).flatten(), each, objective, answers=len(logps), tokens=float(len(logps))
    )
    kl = policy.kl(what, reference, done.actions)
    words_kl = grpo.exact_kl(words, known["said"]) / len(done.groups)
    supervised = _supervised(round, what.logits) if s.mask_weight else loss.new_zeros(())
    metrics |= {
        "kl": float(kl.detach()),
        "words_kl": float(words_kl.detach()),
        "iou_mean": mean_iou(what.logits.detach(), batch.targets),
    }
    return loss + s.kl * kl + s.kl_words * words_kl + s.mask_weight * supervised, metrics


def _supervised(round: Round, logits: Float[Tensor, "B h w"]) -> Float[Tensor, ""]:
    """BCE and dice, weighted as in SFT; each sample's points are drawn by its own seed, wherever it is computed."""
    total = logits.new_zeros(())
    for i, (z, target) in enumerate(zip(logits.split(1), round.batch.targets.split(1), strict=True)):
        seed_everything(round.seed("mask points", i))
        bce, dice = mask_losses(z, target, points=round.mask_points)
        total = total + round.mask_losses[0] * bce + round.mask_losses[1] * dice
    return total / len(logits)


LOOP = Loop(
    prefix="loop2",
    takes=is_region,
    wants="region captions (an image, one mask, its caption)",
    draws=True,
    rewards=lambda settings: settings.rewards_mask,
    judged=lambda settings: settings.use_llm_judge_loop2,
    act=act,
    refer=refer,
    learn=learn,
)
