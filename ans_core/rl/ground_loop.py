"""Pictures -> captions whose phrases have masks (GCG). The sampled words are the action; the policy draws its
own `[SEG]` tokens."""

from __future__ import annotations

import torch

from ans_core.benchmarks import grounded_caption
from ans_core.metrics.grounding import ground, plain_caption
from ans_core.pictures import rle
from ans_core.rl.asking import sample_answers
from ans_core.rl.drawing import draw_answers
from ans_core.rl.experience import Experience
from ans_core.rl.step import Loop, RolloutStep
from ans_core.rl.text_loop import experience_of, learn, read_reference
from ans_core.types import Prediction, Sample


def act(step: RolloutStep) -> Experience:
    samples, group = step.batch.samples, step.settings.group
    requests = [grounded_caption.request(sample) for sample in samples]
    done = experience_of(step, requests, sample_answers(step, requests, "grounded captions"))
    drawn = draw_answers(step, done.groups)
    nothing = [rle.empty(sample.height, sample.width) for sample in samples]
    # for the pictures of rollouts
    done.masks = [rle.union(masks) if masks else nothing[i // group] for i, masks in enumerate(drawn)]
    answers = [
        Prediction(text=text, masks=tuple((mask,) for mask in masks))
        for text, masks in zip(done.texts, drawn, strict=True)
    ]
    with step.timer.part("reward"):
        scores = {
            name: [_score(step, name, samples[i // group], answer) for i, answer in enumerate(answers)]
            for name in step.settings.rewards_ground
        }
    done.rewards = {name: torch.tensor(values).view(-1, group) for name, values in scores.items()}
    return done


def _score(step: RolloutStep, name: str, sample: Sample, answer: Prediction) -> float:
    """iou: mean over all objects, matched one to one; missed ones and extra masks count 0. Others: the
    caption as a text."""
    if name == "iou":
        drawn, true = [masklet[0] for masklet in answer.masks], [masklet[0] for masklet in sample.masks]
        blank = rle.empty(sample.height, sample.width)
        return ground(
            drawn=[mask or blank for mask in drawn],
            drawn_phrases=[""] * len(drawn),
            true=[mask or blank for mask in true],
            true_phrases=[""] * len(true),
        ).miou_all
    return step.rewards[name](Prediction(text=plain_caption(answer.text)), Prediction(text=sample.text))


LOOP = Loop(
    prefix="ground",
    takes=lambda sample: sample.task == "grounded_caption" and len(sample.frames) == 1,
    wants="captioned pictures",
    decodes_masks=True,
    rewards=lambda settings: settings.rewards_ground,
    act=act,
    read_reference=read_reference,
    learn=learn,
)
