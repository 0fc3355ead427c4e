"""What each arm of the simulation does: the guards it has, and what it learns, publishes and asks without
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ans_core.agent.play import play
from ans_core.online.practice import Lesson
from ans_core.stages.online import ARMS, Arm
from ans_core.stages.online_parts import loop_of, worker_of
from tests import tiny
from tests.online.test_admission import task
from tests.online.test_worker import QUESTION, Start, asked, bits, learned, online, silent

ADMISSION = {"gate": 0.7, "verification": True}
NAIVE = {
    "gate": 0.0, "needs_verified": False, "verifies": False,
    "flips": 1.0, "strategy": "majority", "weigh_labels": False, "kl": 0.0, "kl_rises": False, "tasks": 3,
    "replay": 0, "average": 0.0, "canary": 0, "clip_grad": 1.0,
}  # fmt: skip
"""Each majority with weight 1; as many groups in an update as the others; the policy itself is published."""
GUARD = {
    "gate": 0.7, "needs_verified": False, "verifies": False,
    "flips": 0.34, "strategy": "weighted", "weigh_labels": True, "kl": 0.01, "kl_rises": True, "tasks": 2,
    "replay": 1, "average": 0.95, "canary": 2, "clip_grad": 1.0,
}  # fmt: skip
ALL = GUARD | {"needs_verified": True, "verifies": True}
EXPECTED = {
    "naive": NAIVE,
    "naive_canary": NAIVE | {"average": 0.95, "canary": 2},
    "guard": GUARD,
    "guard_verified": ALL,
    "wrong_verifier": ALL,
    "poisoned": ALL,
}


def arm_of(name: str) -> Arm:
    arm = ARMS[name]
    assert arm is not None
    return arm


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm is not None])
def test_an_arm_has_the_guards_of_its_tiers_and_no_others(start: Start, tmp_path: Path, name: str) -> None:
    guard = arm_of(name).guard
    with online(start, tmp_path, admission=ADMISSION, update={"ema": 0.95}) as parts:
        worker = worker_of(parts, waits=False, guard=guard)
        module = loop_of(parts, worker, guard=guard, log=silent)
    practice, gate, beta = worker.practice, worker.practice.gate, worker.practice.progress.beta
    found = {
        "gate": gate.share, "needs_verified": gate.verification, "verifies": practice.confirm is not None,
        "flips": gate.flips,
        "strategy": practice.strategy, "weigh_labels": practice.weigh_labels, "kl": beta,
        "kl_rises": module.control.after(beta, 9.0) > beta, "tasks": worker.settings.tasks,
        "replay": worker.settings.replayed, "average": module.settings.ema, "canary": len(worker.canary("policy")),
        "clip_grad": module.settings.optim.clip_grad,
    }  # fmt: skip
    assert found == EXPECTED[name]
    assert module.control.too_far(9.0) == guard.update


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weight"), [("naive", 1.0), ("guard", 0.625)])
def test_only_admission_lowers_the_weight_of_a_common_label(
    start: Start, tmp_path: Path, name: str, weight: float
) -> None:
    """checked came four times, vertical once: its share of two labels is .8, its weight 1 / (2 * .8)."""
    with online(start, tmp_path) as parts:
        practice = worker_of(parts, waits=False, guard=arm_of(name).guard).practice
        practice.progress.marginal.counts = {"pattern": {"checked": 4.0, "vertical": 1.0}}
        request = parts.ask(QUESTION, [tiny.picture(0)], False)
        said = ["checked", "checked", "vertical"]
        group = play(
            parts.policy.model,
            parts.toolbox,
            [request] * 3,
            limits=parts.limits,
            plans=[[answer] for answer in said],
        )
        lesson = Lesson(name="experience 1", request=request, form="pattern", task=task(question=QUESTION))
        rewards = [rollout.rewards["task"] for rollout in practice._scored(lesson, group)]
    assert rewards == pytest.approx([weight, weight, 0.0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "naive_canary"])
def test_without_the_release_tier_the_policy_itself_is_served(
    start: Start, tmp_path: Path, name: str
) -> None:
    """Of a group that disagrees the policy learns; what is published then is the policy, bit for bit, or its
    average."""
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 6))
        learned(parts, tmp_path / "scratch", steps=2, guard=arm_of(name).guard)
        version = parts.snapshots.served()
        policy = {
            key: tensor.cpu().numpy().tobytes()
            for key, tensor in parts.policy.adapters.tensors("policy").items()
        }
        assert bits(parts, version) != bits(parts, 0)
        assert (bits(parts, version) == policy) == (name == "naive")
