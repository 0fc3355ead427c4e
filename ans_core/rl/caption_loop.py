"""Loop 1: mask -> captions -> masks'. The policy captions a mask; the inverse model draws a mask from each
caption."""

from __future__ import annotations

from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.data.regions import is_region
from ans_core.rewards import WORDLESS
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
    if step.settings.halves:
        _average_over_halves(step, done)
    return done


def _average_over_halves(step: RolloutStep, done: Experience) -> None:
    """Make each reward the weighted mean over the whole caption and halves of it (`rl.halves`). Parts that
    compare the caption with the true one stay those of the whole."""
    weights = step.settings.halves
    sums = {part: values for part, values in done.rewards.items() if part in WORDLESS}
    done.metrics |= {f"halves/whole/{part}": float(values.nanmean()) for part, values in sums.items()}
    for name, weight in weights.items():
        halves = [half_of(text, name) for text in done.texts]
        for part, values in score(step, inverse_masks(step, halves), list(sums)).items():
            sums[part] = sums[part] + weight * values
            done.metrics[f"halves/{name}/{part}"] = float(values.nanmean())
    done.rewards |= {part: values / (1 + sum(weights.values())) for part, values in sums.items()}


def half_of(text: str, name: str) -> str:
    """Return the `first` or the `second` half of a caption's words; a word in the middle belongs to the
    first."""
    words = text.split()
    middle = (len(words) + 1) // 2
    return " ".join(words[:middle] if name == "first" else words[middle:])


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
