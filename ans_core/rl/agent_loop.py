"""Questions -> episodes: the policy calls operations, looks at what comes back and answers; scored as a
whole, learned turn by turn."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import torch

from ans_core.rl.experience import Experience
from ans_core.rl.practice import PlayedRollout
from ans_core.rl.rollout import Group
from ans_core.rl.step import Loop, RolloutStep
from ans_core.rl.text_loop import learn, read_reference

PARTS = {"task": 1.0, "shaping": 1.0}
"""Reward parts and their weights. The practice has weighted and limited the shaping already."""


def act(step: RolloutStep) -> Experience:
    assert step.practice is not None, "an agent needs questions and operations (ans_core/agent/practice.py)"
    with step.timer.part("play"):
        played = step.practice.play(step)
    size = step.settings.group
    own = [played[i : i + size] for i in range(0, len(played), size)]
    assert all(len({one.prefix for one in rollouts}) == 1 for rollouts in own), (
        "rollouts of one sample begin alike"
    )
    return Experience(
        groups=tuple(
            Group(prefix=rollouts[0].prefix, rollouts=tuple(one.rollout for one in rollouts))
            for rollouts in own
        ),
        regions=[[] for _ in own],
        texts=[one.text for one in played],
        masks=[],
        rewards={
            part: torch.tensor([[one.rewards[part] for one in rollouts] for rollouts in own])
            for part in PARTS
        },
        observed=[[part for one in rollouts for part in one.observed] for rollouts in own],
        sampled_logps=[one.logps for one in played],
        metrics=means(played),
    )


def means(played: list[PlayedRollout]) -> dict[str, float]:
    found = defaultdict(list)
    for one in played:
        for name, value in one.measured.items():
            found[name].append(value)
    return {name: fmean(values) for name, values in found.items()}


LOOP = Loop(
    prefix="agent",
    takes=lambda sample: False,  # the stage `rl` has no practice
    wants="questions of the agent's world, which only the stage rft draws",
    rewards=lambda settings: PARTS,
    act=act,
    read_reference=read_reference,
    learn=learn,
)
