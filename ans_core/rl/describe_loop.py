"""Plain captioning: picture -> captions, judged by their words."""

from __future__ import annotations

from ans_core import prompts
from ans_core.rl.round import Experience, Loop, Round
from ans_core.rl.text_loop import learn, practise, refer
from ans_core.types import Request


def act(round: Round) -> Experience:
    text = "<image>\n" + prompts.CAPTION_QUESTION
    return practise(round, [Request(frames=s.frames[:1], text=text) for s in round.batch.samples], "descriptions")


LOOP = Loop(
    prefix="describe",
    takes=lambda sample: sample.task == "grounded_caption",
    wants="captioned pictures",
    rewards=lambda settings: settings.rewards_text,
    act=act,
    refer=refer,
    learn=learn,
)
