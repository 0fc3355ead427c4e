"""Loop 1: mask -> captions -> masks'. The policy captions a mask; the inverse model draws a mask from each
caption."""

from __future__ import annotations

from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.data.regions import is_region
from ans_core.rl.asking import sample_answers
from ans_core.rl.drawing import inverse_masks
from ans_core.rl.experience import Experience
from ans_core.rl.scoring import score
from ans_core.rl.step import Loop, RolloutStep
from ans_core.rl.text_loop import experience_of, learn, read_reference


def act(step: RolloutStep) -> Experience:
    requests = [caption_request(sample, true_mask(sample)) for sample in step.batch.samples]
    done = experience_of(step, requests, sample_answers(step, requests, "captions"))
    predictions = inverse_masks(step, done.texts)
    done.masks = [
        mask
        for prediction in predictions
        for masklet in prediction.masks
        for mask in masklet
        if mask is not None
    ]
    done.rewards = score(step, predictions, step.settings.rewards_caption)
    return done


LOOP = Loop(
    prefix="loop1",
    takes=is_region,
    wants="region captions (an image, one mask, its caption)",
    decodes_masks=True,
    rewards=lambda settings: settings.rewards_caption,
    judged=lambda settings: settings.use_llm_judge,
    act=act,
    read_reference=read_reference,
    learn=learn,
)
