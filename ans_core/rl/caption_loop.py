"""Loop 1: mask -> captions -> masks'. The policy tells what is in a mask; the inverse model draws what it reads."""

from __future__ import annotations

from ans_core.data.regions import is_region
from ans_core.rl.loops import caption_request, true_mask
from ans_core.rl.round import Experience, Loop, Round
from ans_core.rl.text_loop import learn, practised, refer


def act(round: Round) -> Experience:
    requests = [caption_request(sample, true_mask(sample)) for sample in round.batch.samples]
    done = practised(round, requests, round.say(requests, "captions"))
    drawings = round.draws(done.texts)
    done.masks = [mask for drawing in drawings for masklet in drawing.masks for mask in masklet if mask is not None]
    done.rewards = round.score(drawings, round.settings.rewards_caption)
    return done


LOOP = Loop(
    prefix="loop1",
    takes=is_region,
    wants="region captions (an image, one mask, its caption)",
    draws=True,
    rewards=lambda settings: settings.rewards_caption,
    judged=lambda settings: settings.use_llm_judge,
    act=act,
    refer=refer,
    learn=learn,
)
