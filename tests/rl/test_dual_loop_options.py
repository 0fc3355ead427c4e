"""What a run of RL can be set to beside its defaults, and what it does when something is wrong."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from ans_core.benchmarks import referring
from ans_core.config import Rl
from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.data.selection import Joined
from ans_core.judge.judging import Judging
from ans_core.judge.rules import RuleJudge, questions_of
from ans_core.model import checkpointing
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised
from ans_core.pictures import rle
from ans_core.rewards import MASKLESS, REWARDS, corpus_rewards
from ans_core.rl import caption_loop, drawing, ground_loop, mask_loop, refer_loop, text_loop
from ans_core.rl.drawing import decode_seg, draw_answers, to_rle
from ans_core.rl.dual_loop import LOOPS, Beside, DualLoop
from ans_core.rl.experience import Experience
from ans_core.rl.mask_policy import steered
from ans_core.rl.rollout import SampledAnswer, Segment
from ans_core.rl.scoring import score
from ans_core.rl.step import RolloutStep
from ans_core.rl.tokens import answers_of, hidden_states, question_segment
from ans_core.stages.rl_batches import (
    PHRASES_NEED,
    LoopSamples,
    compares_masks,
    compares_words,
    samples_by_loop,
)
from ans_core.types import RLE, Prediction, Sample
from tests import tiny
from tests.rl.test_dual_loop import SAMPLES, a_round, batch, compute, gradients, loops


def trained(module: DualLoop) -> list[torch.nn.Parameter]:
    return [p for p in module.model.parameters() if p.requires_grad]


def one_step(
    module: DualLoop, optimizer: torch.optim.Optimizer, step: int, inner_steps: int
) -> dict[str, float]:
    loss, found = compute(module, batch(module.model, step, inner_steps=inner_steps))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return found | module.after_step(step)


# Several updates on the same rollouts


@pytest.mark.slow
def test_inner_steps_learn_from_the_same_rollouts_against_the_policy_that_acted(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    module, acted = loops(own_model, inner_steps=3), []
    act = LOOPS["mask"].act
    monkeypatch.setitem(
        LOOPS,
        "mask",
        dataclasses.replace(LOOPS["mask"], act=lambda step: acted.append(step.seeds) or act(step)),
    )
    optimizer = torch.optim.AdamW(trained(module), lr=3e-3)
    found = [one_step(module, optimizer, step, 3) for step in range(4)]
    assert [seeds[-1] for seeds in acted] == [0, 1]
    for loop in ("loop1", "loop2"):
        assert [f[f"{loop}/ratio"] == 1.0 and f[f"{loop}/ratio_max"] == 1.0 for f in found] == [
            True,
            False,
            False,
            True,
        ]
        assert (
            found[0][f"{loop}/reward"]
            == found[1][f"{loop}/reward"]
            == found[2][f"{loop}/reward"]
            != found[3][f"{loop}/reward"]
        )
    assert not loops(tiny.build()).waiting


@pytest.mark.slow
def test_a_run_killed_between_inner_steps_goes_on_to_the_same_bits(own_model: Network):
    """State after step 0 of 3 (rollouts still to be learned from), through the bytes of a file that may hold
    no code."""

    def to(module: DualLoop, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            one_step(module, optimizer, step, 3)

    whole = loops(own_model, inner_steps=3)
    optimizer = torch.optim.AdamW(trained(whole), lr=3e-3)
    to(whole, optimizer, 0, 1)
    assert whole.waiting
    file = io.BytesIO()
    state = {
        "model": whole.policies.tensors("policy"),
        "extra": whole.get_extra_state(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, file)
    other = batch(whole.model, 1, inner_steps=3)
    one_of_two = dataclasses.replace(
        other, batches=tuple(dataclasses.replace(b, samples=b.samples[:1]) for b in other.batches)
    )
    with pytest.raises(RuntimeError, match="by another number of processes; go on with that number"):
        whole._goes_on(one_of_two)
    to(whole, optimizer, 1, 5)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = loops(tiny.build(), inner_steps=3)
    again.policies.load("policy", saved["model"])
    again.set_extra_state(saved["extra"])
    fresh = torch.optim.AdamW(trained(again), lr=3e-3)
    fresh.load_state_dict(saved["optimizer"])
    to(again, fresh, 1, 5)
    for adapter in ("policy", "teacher"):
        ours, theirs = whole.policies.tensors(adapter), again.policies.tensors(adapter)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert whole.record == again.record
    assert whole.exploration == again.exploration


def test_rollouts_that_are_gone_are_an_error(own_model: Network):
    with pytest.raises(
        RuntimeError, match="step 1 goes on with rollouts that are gone; start the stage anew"
    ):
        compute(loops(own_model, inner_steps=2), batch(own_model, 1, inner_steps=2))


# Which rollouts are learned from


@pytest.mark.slow
def test_of_more_candidates_those_with_a_spread_are_learned_from(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    """Three candidates for two places; the middle one's rewards are equal. What is learned is what the other
    two alone would teach."""
    three = (SAMPLES[0], tiny.region(2, "a red square"), SAMPLES[1])

    def scored(step: RolloutStep, *args: object, **words: object) -> dict[str, Tensor]:
        parts = score(step, *args, **words)  # type: ignore[arg-type]
        for i, sample in enumerate(step.batch.samples):
            parts["iou"][i] = 0.5 if sample.sample_id == three[1].sample_id else torch.tensor([0.0, 0.5, 1.0])
        return parts

    monkeypatch.setattr(caption_loop, "score", scored)

    def learned(**words: object) -> tuple[Tensor, dict[str, float]]:
        module = loops(tiny.build(), loops={"caption": 1.0}, rewards_caption={"iou": 1.0})
        loss, found = compute(module, batch(module.model, **words))  # type: ignore[arg-type]
        loss.backward()
        return torch.cat([g.flatten() for _, g in sorted(gradients(module).items())]), found

    chosen, found = learned(samples=three, learned=2)
    alone, plain = learned(samples=(three[0], three[2]))
    assert found["loop1/zero_spread"] == pytest.approx(1 / 3)
    assert plain["loop1/zero_spread"] == 0
    assert torch.allclose(chosen, alone, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_truncated_answers_can_be_left_out_of_the_loss(own_model: Network):
    """With 5 tokens hardly any answer ends: left out, nothing is learned in loop 1, but the rewards are
    there."""
    kept = a_round(loops(own_model, loops={"caption": 1.0}, max_tokens=2))
    done = LOOPS["caption"].act(kept)
    assert done.metrics["truncated"] == 1.0
    assert all(r[1].trainable for g in done.groups for r in g.rollouts)
    module = loops(tiny.build(), loops={"caption": 1.0}, max_tokens=2, mask_truncated=True, kl=0.0)
    loss, found = compute(module, batch(module.model))
    assert found["loop1/reward/iou_std"] > 0
    loss.backward()
    assert gradients(module) == {}


@pytest.mark.slow
def test_an_entropy_bonus_makes_the_policy_less_sure(own_model: Network):
    module = loops(own_model, loops={"caption": 1.0}, entropy=1.0, kl=0.0, rewards_caption={"iou": 0.0})
    optimizer = torch.optim.AdamW(trained(module), lr=3e-3, weight_decay=0.0)
    entropies = [one_step(module, optimizer, 0, 1)["loop1/entropy"] for _ in range(6)]
    assert entropies[-1] > entropies[0] + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("form", ["grpo", "dr_grpo", "bnpo", "gspo", "cispo"])
def test_every_form_of_the_objective_trains_both_loops(own_model: Network, form: str):
    module = loops(own_model, objective=form, mask_weight=0.0, kl=0.0, kl_words=0.0)
    loss, _ = compute(module, batch(own_model))
    loss.backward()
    found = gradients(module)
    assert {n for n in found if "lora_B.policy" in n}
    assert {n for n in found if "sam_mask_decoder" in n}


@pytest.mark.slow
def test_a_failed_reward_leaves_its_rollout_out_and_the_others_in(own_model: Network):
    module = loops(own_model, loops={"caption": 1.0}, kl=0.0)
    calls = iter([math.nan, 0.0, 1.0] + [math.nan] * 3)
    module.rewards = {"iou": lambda answer, truth: next(calls), "meteor": lambda answer, truth: 0.0}
    loss, found = compute(module, batch(own_model))
    loss.backward()
    assert loss.isfinite()
    assert found["loop1/failed"] == pytest.approx(4 / 6)
    assert found["loop1/reward/iou"] == 0.5
    assert gradients(module)


# Inverse models


@pytest.mark.slow
@pytest.mark.parametrize("inverse", ["teacher", "policy", "reference"])
def test_the_loops_are_closed_by_the_inverse_model_that_is_set(
    own_model: Network, inverse: str, monkeypatch: pytest.MonkeyPatch
):
    module, drew = loops(own_model, inverse=inverse), []

    def watching(step: RolloutStep, *args: object) -> object:
        drew.append(module.policies.active)
        return decode_seg(step, *args)  # type: ignore[arg-type]

    for room in (drawing, mask_loop):
        monkeypatch.setattr(room, "decode_seg", watching)
    compute(module, batch(own_model))
    assert drew[0] == inverse


# Mask policies


@pytest.mark.slow
def test_the_mask_policy_has_a_gradient_of_its_own(own_model: Network):
    module = loops(
        own_model,
        loops={"mask": 1.0},
        kl=0.0,
        kl_words=0.0,
        mask_weight=0.0,
        rewards_mask={"iou": 1.0},
    )
    module.exploration.width = 0.5
    for step in range(3):
        loss, found = compute(module, batch(own_model, step))
        loss.backward()
    touched = gradients(module)
    assert any("sam_mask_decoder" in n for n in touched)
    assert found["loop2/identical"] == 0.0


@pytest.mark.slow
def test_a_run_without_two_different_masks_stops_and_says_why(own_model: Network):
    module = loops(own_model, mask_sigma=1e-6, stop_identical=3)
    for step in range(2):
        compute(module, batch(own_model, step))
        module.after_step(step)
    compute(module, batch(own_model, 2))
    with pytest.raises(
        RuntimeError,
        match=r"in 3 updates in a row every group of loop 2 had one mask only.*noise is 1.16e-06",
    ):
        module.after_step(2)


@pytest.mark.slow
def test_the_mask_policy_learns_under_autocast(own_model: Network):
    module = loops(own_model, loops={"mask": 1.0})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, found = compute(module, batch(own_model))
    loss.backward()
    assert loss.isfinite()
    assert found["loop2/ratio"] == 1.0
    assert found["loop2/group_pairwise_iou"] <= 1.0


@pytest.mark.slow
def test_exploration_moves_once_an_update_by_all_its_micro_batches(own_model: Network):
    module = loops(own_model, loops={"mask": 1.0}, mask_sigma=1e-6, stop_identical=0)
    compute(module, *(dataclasses.replace(batch(own_model), micro=micro) for micro in range(3)))
    assert module.exploration.width == 1e-6
    module.after_step(0)
    assert (module.exploration.width, module.exploration.identical) == (steered(1e-6, 1.0), 1)
    compute(module, batch(own_model, 1))  # is skipped, so no `after_step` follows, and nothing of it counts
    compute(module, batch(own_model, 2))
    module.after_step(2)
    assert module.exploration.identical == 2


@pytest.mark.slow
def test_rollouts_that_are_learned_from_again_move_no_width_but_count_as_an_update(own_model: Network):
    module = loops(own_model, loops={"mask": 1.0}, mask_sigma=1e-6, inner_steps=2, stop_identical=0)
    for step in range(2):
        compute(module, batch(own_model, step, inner_steps=2))
        module.after_step(step)
    assert (module.exploration.width, module.exploration.identical) == (steered(1e-6, 1.0), 2)


# What can break


@pytest.mark.slow
def test_all_that_is_trained_gets_a_gradient(own_model: Network):
    """DistributedDataParallel waits for it."""
    module = loops(own_model)
    compute(module, batch(own_model))[0].backward()
    assert [n for n, p in own_model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.slow
def test_a_step_that_was_skipped_leaves_nothing_to_the_next(own_model: Network):
    module = loops(own_model)
    for step in (2, 3):
        compute(module, batch(own_model, step))
    assert len(module.alike) == len(module.identical) == 1


@pytest.mark.slow
def test_the_time_of_an_update_holds_its_backward_pass(own_model: Network):
    logged: dict[str, float] = {}
    module = loops(own_model)
    module.log = lambda metrics, step: logged.update(metrics)
    loss, _ = compute(module, batch(own_model))
    so_far = time.perf_counter()
    loss.backward()
    time.sleep(0.1)
    spent = time.perf_counter() - so_far
    module.after_step(0)
    assert logged["rl/seconds/update"] > spent
    assert logged["rl/seconds/step"] > logged["rl/seconds/update"] + logged["rl/seconds/generate"]


@pytest.mark.slow
def test_logits_are_fp32_under_autocast(own_model: Network):
    module = loops(own_model)
    hidden = torch.randn(3, own_model.internvl.lm_head.in_features)
    exact = own_model.logits(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(own_model.logits(hidden), exact)
        _, found = compute(module, batch(own_model))
    assert found["loop1/ratio"] == 1.0


@pytest.mark.slow
def test_an_adapter_that_changes_before_the_backward_pass_is_caught(own_model: Network):
    module = loops(own_model)
    loss, _ = compute(module, batch(own_model))
    with (
        module.policies.using("teacher"),
        pytest.raises(AssertionError, match="backward with the adapter 'teacher' active"),
    ):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["caption", "mask"])
def test_gradient_checkpointing_changes_no_rollout_and_no_gradient(
    own_model: Network, loop: str, monkeypatch: pytest.MonkeyPatch
):
    """Rollouts keep their KV cache, in training mode too. Learning, every layer runs again in the backward
    pass, under the policy; so do the logits, which are made for two tokens at a time here."""
    module = loops(own_model, loops={loop: 1.0})

    texts: list[list[str]] = []
    act = LOOPS[loop].act

    def noting(step: RolloutStep) -> Experience:
        done = act(step)
        texts.append(done.texts)
        return done

    def gradient() -> Tensor:
        module.zero_grad()
        compute(module, batch(own_model))[0].backward()
        return torch.cat([g.flatten() for _, g in sorted(gradients(module).items())])

    monkeypatch.setitem(LOOPS, loop, dataclasses.replace(LOOPS[loop], act=noting))
    plain = gradient()
    own_model.checkpointing = None
    own_model.internvl.model.language_model.train()
    monkeypatch.setattr(checkpointing, "LOGITS", 2 * own_model.internvl.lm_head.out_features)
    graphs = []
    for layer in own_model.internvl.model.language_model.layers:
        layer.self_attn.register_forward_hook(
            lambda module, args, out: graphs.append(torch.is_grad_enabled())
        )
    assert torch.allclose(gradient(), plain, atol=1e-6)
    assert texts[0] == texts[1]
    # forward, and again in backward
    assert sum(graphs) == 2 * len(own_model.internvl.model.language_model.layers)
    assert plain.abs().max() > 0


@pytest.mark.slow
def test_logits_that_are_not_finite_are_counted_and_do_not_stop_the_training(own_model: Network):
    module = loops(own_model)
    with torch.no_grad():
        own_model.internvl.lm_head.weight[7] = torch.nan
    loss, _ = compute(module, batch(own_model))
    assert loss.isfinite()
    assert module.after_step(0)["nonfinite_logits"] > 0


@pytest.mark.slow
def test_two_trainable_sets_over_one_backbone_take_hardly_more_than_themselves(own_model: Network):
    """Unique bytes of all parameters and buffers <= 1.02 x (model + policy + teacher + the originals that
    PEFT keeps)."""
    bare = sum(p.numel() * p.element_size() for p in own_model.state_dict().values())
    module = loops(own_model)
    sets = sum(
        t.numel() * t.element_size()
        for a in ("policy", "teacher")
        for t in module.policies.tensors(a).values()
    )
    unique = {
        p.data_ptr(): p.numel() * p.element_size() for p in [*own_model.parameters(), *own_model.buffers()]
    }
    assert sum(unique.values()) <= 1.02 * (bare + sets)
    for loop in range(2):
        compute(module, batch(own_model, loop))
        module.after_step(loop)
    assert {p.data_ptr() for p in own_model.parameters()} == {
        p.data_ptr() for p in own_model.parameters()
    } & set(unique)


@pytest.mark.slow
def test_features_that_are_encoded_once_give_the_masks_and_gradients_of_features_encoded_anew(
    own_model: Network,
):
    """They are kept from before `conv_s0` and `conv_s1`, which belong to the trained decoder, each adapter
    its own."""
    module = loops(own_model, loops={"mask": 1.0})
    module.begin_step([batch(own_model)])
    done, steps = module.waiting[0], module.acted[0]

    def gradients_of(step: RolloutStep) -> dict[str, Tensor]:
        module.zero_grad()
        LOOPS["mask"].learn(step, done["mask"])[0].backward()
        return {name: g.clone() for name, g in gradients(module).items() if "conv_s" in name}

    cached = gradients_of(steps["mask"])
    pixels = steps["mask"].batch.pixels
    anew = gradients_of(
        dataclasses.replace(
            steps["mask"],
            encoded=dataclasses.replace(steps["mask"].encoded, frames=own_model.sam2.encode(pixels)),
        )
    )
    assert {name.split(".policy.")[1] for name in cached} == {
        f"conv_s{i}.{p}" for i in (0, 1) for p in ("weight", "bias")
    }
    assert all(torch.equal(cached[name], anew[name]) for name in cached)
    with module.policies.using("reference"), torch.no_grad():
        before = own_model.sam2.high_res(steps["mask"].encoded.frames)[0]
    with torch.no_grad():
        for name, p in own_model.named_parameters():
            if "conv_s0" in name and ".policy." in name:
                p.add_(1.0)
        moved = own_model.sam2.high_res(steps["mask"].encoded.frames)[0]
        with module.policies.using("reference"):
            still = own_model.sam2.high_res(steps["mask"].encoded.frames)[0]
    assert torch.equal(before, still)
    assert not torch.allclose(before, moved)


@pytest.mark.slow
def test_time_memory_and_judge_are_logged_apart_from_the_curves(own_model: Network):
    """They differ from run to run, and curves are part of a result."""
    module, logged = loops(own_model, judging(RuleJudge())), []
    module.log = lambda metrics, step: logged.append(metrics)
    _, found = compute(module, batch(own_model))
    found |= module.after_step(0)
    assert {
        f"rl/seconds/{part}" for part in ("encode", "generate", "draw", "reward", "reference", "update")
    } <= set(logged[0])
    assert logged[0]["rl/peak_memory_mb"] > 1
    assert "rl/judge/latency_s" in logged[0]
    assert not set(found) & set(logged[0])
    assert not any("second" in name or "memory" in name for name in found)


# Other tasks


def described() -> Sample:
    return dataclasses.replace(tiny.region(0, "a red square"), task="grounded_caption")


def asked(**words: object) -> Sample:
    sample = dataclasses.replace(
        tiny.region(1, "green"), task="conversation", question="What colour is it?", **words
    )
    return sample


def test_replaced_logits_are_counted_on_after_a_resume(own_model: Network):
    module = loops(own_model)
    module.reader.nonfinite = 7
    state = module.get_extra_state()
    module.reader.nonfinite = 0
    module.set_extra_state(state)
    assert module.reader.nonfinite == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sample"), [("describe", described()), ("vqa", asked()), ("vqa", asked(masks=()))]
)
def test_loops_of_text_alone_train_on_samples_of_their_own(own_model: Network, name: str, sample: Sample):
    assert LOOPS[name].takes(sample)
    assert not LOOPS["caption"].takes(sample)
    module = loops(own_model, loops={name: 1.0}, kl=0.0, max_tokens=8)
    module.rewards = {"meteor": lambda answer, truth: float(sum(map(ord, answer.text)) % 7)}
    loss, found = compute(module, batch(own_model, samples=(sample, sample)))
    loss.backward()
    assert found[f"{LOOPS[name].prefix}/reward/meteor_std"] > 0
    touched = gradients(module)
    assert touched
    assert all("language_model" in n or "projector" in n for n in touched)


@pytest.mark.slow
def test_a_question_after_others_is_learned_from_as_it_was_sampled(own_model: Network):
    """With the earlier questions and answers, and the regions where the first question names them."""
    sample = asked(past=(("What colour is the sky?", "Grey."), ("How many squares are there?", "Two.")))
    module = loops(own_model, loops={"vqa": 1.0}, kl=0.0, max_tokens=8)
    module.rewards = {"meteor": lambda answer, truth: float(len(answer.text) % 3)}
    _, found = compute(module, batch(own_model, samples=(sample, sample)))
    assert found["vqa/sampling_gap"] < 1e-5
    experience = module._rollout_steps(batch(own_model, samples=(sample,)))["vqa"]
    read = own_model.tokenizer.decode(LOOPS["vqa"].act(experience).groups[0].prefix)
    assert (
        read.index("region1")
        < read.index("sky")
        < read.index("Grey.")
        < read.index("Two.")
        < read.index("What colour is it?")
    )


@pytest.mark.slow
def test_what_a_cut_off_answer_draws_is_paid_for_although_nothing_is_learned_from_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else something drawn where nothing is meant would count as a denial, and shift the advantages of the
    group."""
    ids = tuple(tiny.build().tokenizer.encode("It is [SEG] and", add_special_tokens=False))
    said = [SampledAnswer(ids=ids, logps=(0.0,) * len(ids), complete=False)] * 4
    monkeypatch.setattr(refer_loop, "sample_answers", lambda *_: said)
    samples = (expression(0, "a square", tiny.square(0, 0, 32, 64)), expression(1, "a blue square"))
    earned = []
    for left_out in (False, True):
        module = loops(tiny.build(), loops={"refer": 1.0}, group=2, mask_truncated=left_out)
        step = module._rollout_steps(batch(module.model, samples=samples))["refer"]
        with torch.no_grad():
            done = LOOPS["refer"].act(step)
        earned.append(done.rewards["iou"].tolist())
        assert done.learned_tokens() == (0 if left_out else 4 * len(ids))
    assert earned[0] == earned[1]
    assert earned[0][1] == [0.0, 0.0]  # nothing is there to draw


def test_sam2_does_not_look_at_pictures_that_nothing_is_drawn_in(own_model: Network):
    module, looked = loops(own_model, loops={"describe": 1.0}), []
    module.rewards = {"meteor": lambda answer, truth: 0.0}
    own_model.sam2.image_encoder.register_forward_hook(lambda *_: looked.append(1))
    compute(module, batch(own_model, samples=(described(), described())))
    assert looked == []


def by_loop(samples: Sequence[Sample], loops: Sequence[str], **options: Any) -> LoopSamples:
    return samples_by_loop(Joined([samples]), loops, **options)


def test_practice_is_the_samples_that_a_loop_takes_and_none_is_an_error():
    samples = [*SAMPLES, described(), asked()]
    found = by_loop(samples, ("caption", "mask", "describe"))
    assert [*map(list, found.samples)] == [list(SAMPLES), [samples[2]]]
    assert found.of == {"caption": 0, "mask": 0, "describe": 1}
    with pytest.raises(ValueError, match=r"rl\.loops has 'vqa', which needs questions about pictures"):
        by_loop(list(SAMPLES), ("caption", "vqa"))


def expression(image: int, text: str, *squares: RLE) -> Sample:
    """An expression that means these squares of a picture."""
    return dataclasses.replace(
        tiny.region(image, text), task="referring", masks=tuple((square,) for square in squares)
    )


def test_referring_pays_for_the_mask_of_all_that_is_meant_and_for_silence_where_nothing_is(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    """By hand: what is drawn is the union of both squares, or nothing."""
    left, right = tiny.square(0, 0, 32, 64), tiny.square(32, 0, 48, 64)
    samples = (expression(0, "both squares", left, right), expression(1, "a blue square"))
    module = loops(own_model, loops={"refer": 1.0})
    drawn = [[rle.union([left, right])], [left, right], [], [], [right], [rle.empty(64, 64)]]
    monkeypatch.setattr(refer_loop, "draw_answers", lambda step, groups: drawn)
    _, found = compute(module, batch(own_model, samples=samples))
    assert module.record["refer/iou"] == [pytest.approx([1, 2 / 3, 0, 1, 0, 1], abs=1e-4)]
    assert found["refer/denied_if_there"] == found["refer/denied_if_absent"] == pytest.approx(1 / 3)


def test_a_sampled_answer_draws_all_its_seg_tokens(own_model: Network):
    """What it draws is what the model draws for the answer that a user asks for."""
    sample = expression(0, "a square", tiny.square(0, 0, 32, 64))
    module = loops(own_model, loops={"refer": 1.0}, group=3)
    step = module._rollout_steps(batch(own_model, samples=(sample, sample)))["refer"]
    said = own_model.tokenizer.encode("[SEG] It is [SEG].", add_special_tokens=False)
    silent = own_model.tokenizer.encode("It is.", add_special_tokens=False)
    asked = question_segment(step, referring.request(sample).text.removeprefix("<image>").removeprefix("\n"))
    answers = [Segment(ids=tuple(ids), trainable=True) for ids in (silent, said, said)]
    groups = [answers_of(step, i, asked, answers) for i in range(2)]
    masks = draw_answers(step, groups)
    assert [len(some) for some in masks] == [0, 2, 2] * 2
    packed, hidden, _ = hidden_states(step, groups, [[], []])
    each = decode_seg(step, packed, hidden).logits.detach()
    assert masks[1] == [to_rle(step, each[0], 0), to_rle(step, each[1], 0)]
    assert masks[4] == [to_rle(step, each[4], 1), to_rle(step, each[5], 1)]


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["Sure, [SEG].", "Two."])
def test_rows_of_sft_beside_the_loops_give_every_trained_part_a_gradient(
    own_model: Network, answer: str, monkeypatch: pytest.MonkeyPatch
):
    """Loss and gradients are those of loops and rows by themselves, added."""
    said(monkeypatch, own_model, "No.", "It is not.", "No.")
    module = loops(own_model, loops={"caption": 1.0}, rows_weight=2.0)
    supervised = Supervised(own_model, mask_weight=1.0, dice_weight=1.0, points=100)
    turn = Turn(
        question="What is it?",
        answer=answer,
        masks=((tiny.square(0, 0, 32, 32),),) if "[SEG]" in answer else (),
    )
    own = collate([tiny.row(turn)], own_model.tokenizer, tiny.layout(own_model))
    alone, _ = compute(module, batch(own_model))
    beside, _ = supervised(*supervised.begin_step([own]))
    module.beside = Beside(supervised=supervised)
    both, found = compute(module, dataclasses.replace(batch(own_model), rows=own))
    assert both.item() == pytest.approx(alone.item() + 2 * beside.item(), rel=1e-5)
    assert found["rows/text"] > 0
    both.backward()
    assert [name for name, p in own_model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert any("sam_mask_decoder" in name for name in gradients(module)) == ("[SEG]" in answer)


def said(monkeypatch: pytest.MonkeyPatch, model: Network, *texts: str) -> None:
    """Let these be the answers of every group, cut off or whole."""
    answers = [tuple(model.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    sampled = [SampledAnswer(ids=ids, logps=(0.0,) * len(ids), complete=True) for ids in answers]
    for loop in (refer_loop, ground_loop):
        monkeypatch.setattr(loop, "sample_answers", lambda step, requests, what: sampled * len(requests))


def test_grounded_captions_are_paid_for_all_objects_and_for_their_words(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    left, right = tiny.square(0, 0, 32, 64), tiny.square(32, 0, 48, 64)
    sample = dataclasses.replace(
        described(), text="a red square", masks=((left,), (right,)), phrases=((0, 1), (2, 12))
    )
    module = loops(own_model, loops={"ground": 1.0})
    drawn = [[left, right], [right, left], [left], [], [left, right, left], [left]]
    monkeypatch.setattr(ground_loop, "draw_answers", lambda step, groups: drawn)
    monkeypatch.setattr(text_loop, "answer_text", lambda step, answer: "<p>a red square</p> [SEG]")
    compute(module, batch(own_model, samples=(sample, sample)))
    assert module.record["ground/iou"] == [pytest.approx([1, 1, 0.5, 0, 2 / 3, 0.5], abs=1e-4)]
    assert module.record["ground/meteor"][0] == [1.0] * 6


def test_a_share_of_what_is_referred_to_is_absent():
    there, absent = (
        [expression(0, "x", tiny.square(0, 0, 8, 8))] * 6,
        [expression(1, "a"), expression(1, "b"), expression(1, "c")],
    )
    found = by_loop([*there, *absent], ("refer",), absent=0.25)
    assert [s.text for s in found.samples[0]] == ["x"] * 6 + ["a", "b"]
    assert len(by_loop([*there, *absent], ("refer",), absent=0.5).samples[0]) == 12
    with pytest.warns(UserWarning, match="never practises to deny"):
        assert by_loop(there, ("refer",), absent=0.5).samples[0][:] == there


# The judge


def judging(judge: object, **words: object) -> Judging:
    questions = {(s.dataset, s.sample_id): questions_of(s.text, positives=4, negatives=3) for s in SAMPLES}
    return Judging(
        judge=judge,
        questions=questions,
        **{"meteor_weight": 0.25, "judge_weight": 0.75, "on_failure": "meteor"} | words,
    )  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_judge_pays_captions_beside_meteor(own_model: Network, monkeypatch: pytest.MonkeyPatch):
    module = loops(
        own_model,
        judging(RuleJudge()),
        loops={"caption": 1.0},
        use_llm_judge=True,
        rewards_caption={"meteor": 1.0},
    )
    act = LOOPS["caption"].act

    def saying(step: RolloutStep) -> object:
        done = act(step)
        done.texts = [
            "a red square",
            "a blue square",
            "",
            "a small green square",
            "a large green square",
            "a green circle",
        ]
        done.rewards = score(step, [Prediction(text=text) for text in done.texts], ("meteor",))
        return done

    monkeypatch.setitem(LOOPS, "caption", dataclasses.replace(LOOPS["caption"], act=saying))
    _, found = compute(module, batch(own_model))
    paid = module.record["loop1/meteor"][0]
    assert paid[0] == paid[3] == 1.0
    assert paid[2] == 0.0
    assert 0 < paid[4] < 1
    assert paid[1] < 1
    assert found["loop1/judge/fell_back"] == 0
    assert found["loop1/reward/judge"] > 0


@pytest.mark.slow
def test_a_judge_that_fails_for_one_caption_leaves_its_group_to_meteor(own_model: Network):
    class Failing(RuleJudge):
        def submit(self, asked):  # type: ignore[no-untyped-def]
            future: Future[list[float | None]] = Future()
            future.set_result([None, 1.0, 1.0, 0.5, 0.5, 0.5])
            return future

    module = loops(
        own_model,
        judging(Failing()),
        loops={"caption": 1.0},
        use_llm_judge=True,
        rewards_caption={"meteor": 1.0},
    )
    _, found = compute(module, batch(own_model))
    assert found["loop1/judge/fell_back"] == 0.5
    # the tiny model's words earn no METEOR
    assert module.record["loop1/meteor"][0] == [0.0, 0.0, 0.0, 0.375, 0.375, 0.375]


# Pictures


@pytest.mark.slow
def test_what_was_tried_is_drawn_for_people(own_model: Network, tmp_path: Path):
    module = loops(own_model, samples_every=2)
    module.pictures_to = tmp_path / "samples"
    for step in range(3):
        compute(module, batch(own_model, step))
    assert sorted(p.name for p in module.pictures_to.iterdir()) == [
        f"{step:06d}-{loop}.{kind}" for step in (0, 2) for loop in ("loop1", "loop2") for kind in ("json", "png")
    ]  # fmt: skip
    with Image.open(module.pictures_to / "000000-loop1.png") as picture:
        assert picture.width > 3 * picture.height / 2


def test_masks_without_words_are_practised_on_if_no_reward_reads_a_caption():
    left, right, nothing = tiny.square(0, 0, 8, 8), tiny.square(8, 8, 16, 16), rle.empty(64, 64)
    unnamed = tiny.sample(3, task="tracking", text="", masks=((left,), (nothing,), (right,)))
    clip = tiny.clip(4, task="tracking", text="")
    found = by_loop([*SAMPLES, unnamed, clip], ("caption", "mask"), wordless=True)
    assert found.of == {"caption": 0, "mask": 1}
    assert found.samples[1][:] == list(SAMPLES)
    added = found.samples[0][len(SAMPLES) :]
    assert [(s.masks, s.text) for s in added] == [(((left,),), ""), (((right,),), "")]
    assert len({s.sample_id for s in added}) == 2
    assert all(LOOPS["caption"].takes(s) for s in added)
    # no such mask: encoded once
    assert by_loop(SAMPLES, ("caption", "mask"), wordless=True).of == {"caption": 0, "mask": 0}


@pytest.mark.parametrize(
    ("rewards", "judged", "reads"),
    [
        ({"iou": 1.0}, False, False),
        ({"iou": 1.0, "format": 0.1}, False, False),
        ({"iou": 1.0, "meteor": 0.0}, False, True),  # its curve would count no caption as a wrong one
        ({"iou": 1.0, "meteor": 0.1}, False, True),
        ({"iou": 1.0, "cider": 1.0}, False, True),
        ({"iou": 1.0, "meteor": 0.1}, True, True),
    ],
)
def test_which_rewards_of_loop_1_read_the_true_caption(rewards: dict[str, float], judged: bool, reads: bool):
    assert compares_words(Rl(rewards_caption=rewards, use_llm_judge=judged)) == reads


def test_a_mask_without_words_teaches_captions(own_model: Network):
    unnamed = tiny.sample(3, task="tracking", text="")
    samples = tuple(by_loop([unnamed], ("caption",), wordless=True).samples[0])
    module = loops(own_model, loops={"caption": 1.0}, kl=0.0, rewards_caption={"iou": 1.0, "meteor": 0.0})
    turns = itertools.cycle((0.0, 1.0))
    module.rewards = module.rewards | {"iou": lambda answer, truth: next(turns)}
    loss, found = compute(module, batch(own_model, samples=samples * 2))
    loss.backward()
    assert found["loop1/reward/iou_std"] > 0
    assert gradients(module)


def test_captions_without_masks_are_practised_on_if_nothing_reads_a_mask(caplog: pytest.LogCaptureFixture):
    phrase = tiny.sample(3, task="phrase", text="the small square", masks=())
    found = by_loop([*SAMPLES, phrase], ("caption", "mask"), maskless=True)
    assert found.samples[found.of["mask"]][:] == [*SAMPLES, phrase]
    assert found.samples[found.of["caption"]][:] == list(SAMPLES)
    assert not caplog.messages
    assert by_loop([*SAMPLES, phrase], ("caption", "mask")).samples[0][:] == list(SAMPLES)
    assert caplog.messages == [f"1 texts without masks are not used: {PHRASES_NEED}"]
    with pytest.raises(ValueError, match="'mask', which needs region captions"):
        by_loop([phrase], ("mask",))


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({"rewards_mask": {"meteor": 1.0}, "mask_weight": 0.0}, False),
        ({"rewards_mask": {"cider": 1.0, "confidence": 0.1}, "mask_weight": 0.0}, False),
        # its curve would count no mask as a wrong one
        ({"rewards_mask": {"meteor": 1.0, "iou": 0.0}, "mask_weight": 0.0}, True),
        ({"rewards_mask": {"meteor": 1.0}, "mask_weight": 0.1}, True),
        ({"rewards_mask": {"meteor": 1.0, "soft_iou": 0.1}, "mask_weight": 0.0}, True),
        ({"rewards_mask": {"meteor": 1.0}, "mask_weight": 0.0, "use_llm_judge_loop2": True}, True),
    ],
)
def test_what_of_loop_2_reads_the_true_mask(changes: dict[str, Any], reads: bool):
    assert compares_masks(Rl(**changes)) == reads


def test_a_reward_that_is_said_to_read_no_mask_reads_none():
    truth = Prediction(text="a red square", masks=((tiny.square(0, 0, 8, 8),),))
    answer = Prediction(text="a red circle", masks=((tiny.square(8, 8, 16, 16),),))
    rewards = REWARDS | corpus_rewards(["a red square", "a dog"], needed=MASKLESS)
    values = {name: rewards[name](answer, truth) for name in sorted(MASKLESS)}
    assert values == {name: rewards[name](answer, dataclasses.replace(truth, masks=())) for name in values}


@pytest.mark.slow
def test_a_caption_without_a_mask_teaches_masks(own_model: Network, tmp_path: Path):
    phrases = tuple(tiny.sample(i, task="phrase", text="the small square", masks=()) for i in (3, 4))
    module = loops(
        own_model,
        loops={"mask": 1.0},
        kl=0.0,
        kl_words=0.0,
        rewards_mask={"meteor": 1.0},
        mask_weight=0.0,
        samples_every=1,
    )
    module.pictures_to = tmp_path
    turns = itertools.cycle((0.0, 1.0))
    module.rewards = module.rewards | {"meteor": lambda answer, truth: next(turns)}
    loss, found = compute(module, batch(own_model, samples=phrases))
    loss.backward()
    assert found["loop2/reward/meteor_std"] > 0
    assert "loop2/iou_mean" not in found
    assert gradients(module)
    assert list(tmp_path.glob("*.png"))
    _, paired = compute(module, batch(own_model, samples=(SAMPLES[0], *phrases)))
    assert 0 <= paired["loop2/iou_mean"] <= 1
