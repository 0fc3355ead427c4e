"""Expressions -> answers that draw what is meant, or deny that it is there; scored as gRefCOCO scores them. What is
sampled are the words: whether there is something to draw."""

from __future__ import annotations

from ans_core.benchmarks import referring
from ans_core.benchmarks.score import meant
from ans_core.pictures import rle
from ans_core.rl.asking import sample_answers
from ans_core.rl.drawing import draw_answers
from ans_core.rl.experience import Experience
from ans_core.rl.scoring import score
from ans_core.rl.step import Loop, RolloutStep
from ans_core.rl.text_loop import experience_of, learn, read_reference
from ans_core.types import RLE, Prediction, Sample


def act(step: RolloutStep) -> Experience:
    samples, group = step.batch.samples, step.settings.group
    requests = [referring.request(sample) for sample in samples]
    done = experience_of(step, requests, sample_answers(step, requests, "answers"))
    drawn = draw_answers(step, done.groups)
    nothing = [rle.empty(sample.height, sample.width) for sample in samples]
    # As in the benchmark, only an answer's first mask counts.
    done.masks = [masks[0] if masks else nothing[i // group] for i, masks in enumerate(drawn)]
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
