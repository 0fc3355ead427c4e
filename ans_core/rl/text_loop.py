"""Shared by loops whose action is a text: sampled answers as rollouts, and GRPO on their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ans_core.model.packing import Packed
from ans_core.rl import grpo
from ans_core.rl.asking import answer_text, sample_answers
from ans_core.rl.experience import Experience
from ans_core.rl.rollout import SampledAnswer, Segment, token_logps
from ans_core.rl.scoring import score
from ans_core.rl.step import RolloutStep
from ans_core.rl.tokens import (
    answers_of,
    hidden_states,
    observed_features,
    question_segment,
    region_cells,
)
from ans_core.types import Prediction, Request


def experience_of(
    step: RolloutStep, requests: Sequence[Request], answers: Sequence[SampledAnswer]
) -> Experience:
    """Turn sampled answers into rollouts; rewards are still missing."""
    s, size = step.settings, step.settings.group
    groups, regions = [], []
    for i, request in enumerate(requests):
        cells = [region_cells(step, i, mask) for mask in request.mask_prompts]
        *past, (asked, _) = [
            (q.removeprefix("<image>").removeprefix("\n"), a) for q, a in (*request.past, (request.text, ""))
        ]
        question = question_segment(step, asked, [int(c.sum()) for c in cells], past)
        own = answers[i * size : (i + 1) * size]
        learned = [Segment(ids=a.ids, trainable=a.complete or not s.mask_truncated) for a in own]
        groups.append(answers_of(step, i, question, learned))
        regions.append(cells)
    texts = [answer_text(step, a) for a in answers]
    lengths = [len(a.ids) for a in answers]
    metrics = {
        "length": sum(lengths) / len(lengths),
        "length_min": float(min(lengths)),
        "length_max": float(max(lengths)),
        "truncated": sum(not a.complete for a in answers) / len(answers),
        "distinct": sum(len(set(texts[i : i + size])) for i in range(0, len(texts), size)) / len(texts),
    }
    sampled = [a.logps for a in answers]
    return Experience(
        groups=tuple(groups),
        regions=regions,
        texts=texts,
        masks=[],
        rewards={},
        metrics=metrics,
        sampled_logps=sampled,
    )


def read_reference(step: RolloutStep, done: Experience) -> None:
    packed, hidden, _ = _hidden_states(step, done)
    done.reference = token_logps(step.model, packed, hidden, step.reader)[0]


def _hidden_states(
    step: RolloutStep, done: Experience
) -> tuple[Packed, Float[Tensor, "B L D"], Int[Tensor, " M"]]:
    return hidden_states(step, done.groups, done.regions, observed_features(step, done.observed))


def learn(step: RolloutStep, done: Experience) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Return the loss of the tokens sampled, and metrics."""
    packed, hidden, rollout = _hidden_states(step, done)
    s, advantage, reference = step.settings, done.advantage, done.reference
    assert advantage is not None, "advantages come before learning"
    assert reference is not None, "the reference reads before the policy learns"
    logps, entropies = token_logps(step.model, packed, hidden, step.reader, learn_entropy=bool(s.entropy))
    if done.behaviour is None:
        done.behaviour = logps.detach()
        done.metrics["sampling_gap"] = _sampling_gap(done, logps.detach())
    loss, metrics = grpo.policy_loss(
        logps,
        done.behaviour,
        advantage.to(logps.device).flatten()[rollout],
        rollout,
        step.objective,
        answers=advantage.numel(),
        totals=step.totals,
    )
    kl_loss, kl = grpo.token_kl(logps, reference)
    share = len(logps) / max(step.totals.tokens, 1.0)
    loss = loss + s.kl * share * kl_loss
    entropy = entropies.sum() / max(len(entropies), 1)
    if s.entropy:
        loss = loss - s.entropy * share * entropy
    return loss, metrics | {"kl": kl, "entropy": float(entropy.detach())}


def _sampling_gap(done: Experience, logps: Float[Tensor, " M"]) -> float:
    """Return the largest difference between a token's log-probability when sampled and when learned: rounding
    alone, unless the two read the model differently."""
    learned = [
        any(segment.trainable for segment in rollout) for group in done.groups for rollout in group.rollouts
    ]
    sampled = [p for ps, kept in zip(done.sampled_logps, learned, strict=True) if kept for p in ps]
    return float((logps.cpu() - torch.tensor(sampled)).abs().max()) if sampled else 0.0


def text_experience(step: RolloutStep, requests: Sequence[Request], what: str) -> Experience:
    """Sample answers that are scored as texts alone. `what` names them and is part of the sampling seed."""
    done = experience_of(step, requests, sample_answers(step, requests, what))
    done.rewards = score(step, [Prediction(text=text) for text in done.texts], step.settings.rewards_text)
    return done
