"""Questions about a picture or its regions -> answers, scored against the true answers."""

from __future__ import annotations

from ans_core import prompts
from ans_core.data.conversation import regions_of
from ans_core.rl.experience import Experience
from ans_core.rl.step import Loop, RolloutStep
from ans_core.rl.text_loop import learn, read_reference, text_experience
from ans_core.types import Request, Sample


def act(step: RolloutStep) -> Experience:
    return text_experience(step, [request(sample) for sample in step.batch.samples], "answers")


def request(sample: Sample) -> Request:
    shown = regions_of(sample)
    gap = "" if shown else "\n"  # the sentence that lists regions has its own
    questions = [prompts.plain_question(question) for question, _ in sample.past] + [
        prompts.plain_question(sample.question or "")
    ]
    questions[0] = f"<image>{gap}{questions[0]}"
    past = tuple(zip(questions[:-1], (answer for _, answer in sample.past), strict=True))
    return Request(frames=sample.frames[:1], text=questions[-1], past=past, mask_prompts=shown)


LOOP = Loop(
    prefix="vqa",
    takes=lambda sample: sample.task == "conversation" and len(sample.frames) == 1,
    wants="questions about pictures with their answers",
    rewards=lambda settings: settings.rewards_text,
    act=act,
    read_reference=read_reference,
    learn=learn,
)
