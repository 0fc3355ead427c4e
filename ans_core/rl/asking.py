"""Answers in words: sampled from the policy, or read greedily from the inverse model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ans_core.benchmarks.loops import caption_request
from ans_core.inference.generation import generate, spoken_ids, text_of
from ans_core.inference.prefill import prompt
from ans_core.pictures import rle
from ans_core.rl.rollout import SampledAnswer, sample
from ans_core.rl.step import RolloutStep
from ans_core.types import RLE, Request


def sample_answers(step: RolloutStep, requests: Sequence[Request], what: str) -> list[SampledAnswer]:
    """Sample G answers of the policy to the request about each sample."""
    group = step.settings.group
    seeds = [step.seed(what, i, g) for i in range(len(requests)) for g in range(group)]
    with torch.no_grad(), step.timer.part("generate"):
        prompted = prompt(step.model, requests, step.encoded.vision)
        answers = sample(
            step.model,
            prompted,
            group=group,
            max_tokens=step.settings.max_tokens,
            reader=step.reader,
            seeds=seeds,
        )
    step.timer.generated += sum(len(answer.ids) for answer in answers)
    return answers


def answer_text(step: RolloutStep, said: SampledAnswer) -> str:
    return text_of(step.model, spoken_ids(step.model, list(said.ids)))


@torch.no_grad()
def inverse_captions(step: RolloutStep, masks: Sequence[RLE]) -> list[str]:
    """Return the inverse model's greedy captions of G masks per sample; an empty mask gets an empty
    text."""
    group = step.settings.group
    asked = [i for i, mask in enumerate(masks) if rle.area(mask)]
    texts = [""] * len(masks)
    if not asked:
        return texts
    requests = [caption_request(step.batch.samples[i // group], masks[i]) for i in asked]
    with step.timer.part("generate"), step.policies.using(step.settings.inverse):
        prompted = prompt(step.model, requests, [step.encoded.vision[i // group] for i in asked])
        answers = generate(step.model, prompted, max_tokens=step.settings.max_tokens)
    step.timer.generated += sum(map(len, answers))
    for i, ids in zip(asked, answers, strict=True):
        texts[i] = text_of(step.model, spoken_ids(step.model, ids))
    return texts
