"""Plain captioning: picture -> captions, scored against the true caption."""

from __future__ import annotations

from ans_core import prompts
from ans_core.rl.experience import Experience
from ans_core.rl.step import Loop, RolloutStep
from ans_core.rl.text_loop import learn, read_reference, text_experience
from ans_core.types import Request


def act(step: RolloutStep) -> Experience:
    text = "<image>\n" + prompts.CAPTION_QUESTION
    return text_experience(
        step, [Request(frames=s.frames[:1], text=text) for s in step.batch.samples], "descriptions"
    )


LOOP = Loop(
    prefix="describe",
    takes=lambda sample: sample.task == "grounded_caption",
    wants="captioned pictures",
    rewards=lambda settings: settings.rewards_text,
    act=act,
    read_reference=read_reference,
    learn=learn,
)
