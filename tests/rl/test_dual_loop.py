from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ans_core import prompts
from ans_core.benchmarks.loops import (
    averages,
    caption_request,
    expression_of,
    loop_scores,
    loop_scores_of_truth,
    mask_request,
    true_mask,
)
from ans_core.config import Rl
from ans_core.data.selection import Expressions, Joined
from ans_core.dist import own_share
from ans_core.inference import generation
from ans_core.inference.prefill import prompt
from ans_core.judge.judging import Judging
from ans_core.model import adapters, parts
from ans_core.model.network import Network
from ans_core.rewards import REWARDS
from ans_core.rewards.confidence import MaskPrediction
from ans_core.rl import caption_loop, dual_loop, grpo, rollout, text_loop
from ans_core.rl.asking import sample_answers
from ans_core.rl.batch import rl_batch
from ans_core.rl.drawing import inverse_masks
from ans_core.rl.dual_loop import LOOPS, Batches, DualLoop, check_learned
from ans_core.rl.scoring import score
from ans_core.rl.step import RolloutStep
from ans_core.rl.tokens import hidden_states
from ans_core.stages.rl_batches import repeats_of, rows_of
from ans_core.types import Prediction, Request, Sample
from tests import tiny

SETTINGS = Rl().model_copy(update={
    "loops": {"caption": 1.0, "mask": 0.5}, "group": 3, "max_tokens": 5, "scale_rewards": "within",
    "mask_grid": 4, "samples_every": 0, "ema": 0.99, "ema_warmup": True,
})  # fmt: skip
SAMPLES = (
    tiny.region(0, "a red square"),
    tiny.region(1, "a small green square", masks=((tiny.square(24, 24, 60, 60),),)),
)


def loops(model: Network, judging: Judging | None = None, **changes: object) -> DualLoop:
    both = adapters.Policies(
        model,
        adapters.rl_config(
            rank=4, alpha=8, dropout=0.0, modules=adapters.policy_modules(model, drawing=True)
        ),
        seed=0,
    )
    settings = SETTINGS.model_copy(update=changes)
    return DualLoop(
        both, settings, seed=0, points=100, loss_weights=(2.0, 0.5), rewards=REWARDS, judging=judging
    )


def batch(
    model: Network,
    step: int = 0,
    *,
    inner_steps: int = 1,
    samples: tuple[Sample, ...] = SAMPLES,
    asked: tuple[str, ...] | None = None,
    learned: int | None = None,
    of: tuple[str, ...] = tuple(LOOPS),
) -> Batches:
    asked = asked or tuple(s.text for s in samples)
    return Batches(
        batches=[rl_batch(samples, asked, model, mask_size=32)],
        of=dict.fromkeys(of, 0),
        learned=learned or len(samples),
        rollout=step // inner_steps,
        micro=0,
        inner=step % inner_steps,
        step=step,
    )


def compute(module: DualLoop, *micros: Batches) -> tuple[Tensor, dict[str, float]]:
    """A step's loss, and the metrics of its last micro-batch."""
    found = [module(micro) for micro in module.begin_step(micros)]
    return torch.stack([loss for loss, _ in found]).sum(), found[-1][1]


def a_round(module: DualLoop, loop: str = "caption", **words: object) -> RolloutStep:
    return module._rollout_steps(batch(module.model, **words))[loop]  # type: ignore[arg-type]


def gradients(module: DualLoop) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.model.named_parameters() if p.grad is not None and p.grad.any()}


# (1 + 1) / (10 + 1), the warm-up's first
@pytest.mark.slow
@pytest.mark.parametrize(("warmup", "decay"), [(True, 2 / 11), (False, 0.99)])
def test_a_step_moves_the_policy_alone_and_the_teacher_only_by_its_average(
    own_model: Network, warmup: bool, decay: float
):
    module = loops(own_model, ema_warmup=warmup)
    before, teacher = (
        parts.hashes(own_model),
        {k: v.clone() for k, v in module.policies.tensors("teacher").items()},
    )
    optimizer = torch.optim.AdamW([p for p in own_model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(0)
    loss, _ = compute(module, batch(own_model))
    loss.backward()
    optimizer.step()
    assert all(torch.equal(v, teacher[k]) for k, v in module.policies.tensors("teacher").items())
    policy = {k: v.clone() for k, v in module.policies.tensors("policy").items()}
    distance = module.after_step(0)["teacher_distance"]
    assert distance > 0
    for k, v in module.policies.tensors("teacher").items():
        assert torch.allclose(v, decay * teacher[k] + (1 - decay) * policy[k], atol=1e-6)
    moved = parts.check_moved(before, own_model)
    assert {part for part, did in moved.items() if did and part.endswith("(trained)")} == {
        "projector (trained)", "language model (trained)", "text_hidden_fcs (trained)", "SAM2 mask decoder (trained)"
    }  # fmt: skip


@pytest.mark.slow
def test_every_loop_has_the_curves_that_tell_how_it_learns(own_model: Network):
    module = loops(own_model)
    torch.manual_seed(0)
    loss, found = compute(module, batch(own_model))
    shared = (
        "loss",
        "policy_loss",
        "kl",
        "clip_low",
        "clip_high",
        "reward",
        "reward_std",
        "zero_spread",
        "failed",
    )
    assert {f"{loop}/{name}" for loop in ("loop1", "loop2") for name in shared} <= found.keys()
    assert {
        f"loop1/{name}" for name in ("entropy", "length", "truncated", "distinct", "sampling_gap")
    } <= found.keys()
    parts_of = ("iou", "iou_std", "meteor", "meteor_std")
    assert {f"{loop}/reward/{part}" for loop in ("loop1", "loop2") for part in parts_of} <= found.keys()
    weights = module.settings.loops
    assert loss.item() == pytest.approx(
        weights["caption"] * found["loop1/loss"] + weights["mask"] * found["loop2/loss"], rel=1e-5
    )


@pytest.mark.slow
def test_the_loop_of_captions_has_a_gradient_of_its_own(own_model: Network):
    module = loops(own_model, loops={"caption": 1.0}, kl=0.0)
    torch.manual_seed(0)
    loss, found = compute(module, batch(own_model))
    loss.backward()
    assert found["loop1/reward/iou_std"] > 0
    assert {n for n in gradients(module) if ".lora_B.policy." in n}
    assert all(".policy." in n for n in gradients(module))


@pytest.mark.slow
def test_the_loop_of_masks_has_a_gradient_without_the_supervised_loss_and_the_kl(own_model: Network):
    """The original algorithm has none here."""
    module = loops(own_model, loops={"mask": 1.0}, kl=0.0, kl_words=0.0, mask_weight=0.0)
    torch.manual_seed(0)
    loss, found = compute(module, batch(own_model))
    loss.backward()
    assert found["loop2/reward/iou_std"] > 0
    touched = {parts.part_of(n) for n in gradients(module)}
    assert {"text_hidden_fcs", "SAM2 mask decoder", "language model"} <= touched
    assert all(".policy." in n for n in gradients(module))


@pytest.mark.slow
def test_equal_rewards_leave_only_the_regularisers(own_model: Network):
    """No answer scores: without KL and supervised loss the gradient is exactly zero."""
    module = loops(
        own_model,
        kl=0.0,
        kl_words=0.0,
        mask_weight=0.0,
        rewards_caption={"iou": 0.0},
        rewards_mask={"iou": 0.0},
    )
    torch.manual_seed(0)
    loss, found = compute(module, batch(own_model))
    loss.backward()
    assert gradients(module) == {}
    assert (found["loop1/zero_spread"], found["loop2/zero_spread"]) == (1.0, 1.0)


@pytest.mark.slow
def test_at_first_ratio_is_one_and_kl_is_zero(own_model: Network):
    torch.manual_seed(0)
    _, found = compute(loops(own_model), batch(own_model))
    assert found["loop1/ratio"] == found["loop2/ratio"] == 1.0
    assert abs(found["loop1/kl"]) < 1e-9
    assert abs(found["loop2/kl"]) < 1e-9


@pytest.mark.slow
def test_the_kl_pulls_a_policy_that_moved_back_to_the_reference(own_model: Network):
    module = loops(
        own_model, kl=1.0, mask_weight=0.0, rewards_caption={"iou": 0.0}, rewards_mask={"iou": 0.0}
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in own_model.parameters():
            if p.requires_grad:
                p.add_(0.03 * torch.randn(p.shape, generator=generator))
    optimizer = torch.optim.AdamW(
        [p for p in own_model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0
    )
    kls = []
    for step in range(16):
        torch.manual_seed(step)
        loss, found = compute(module, batch(own_model, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kls.append((found["loop1/kl"], found["loop2/kl"]))
    assert min(kls[0]) > 0
    for loop in (0, 1):  # a few samples estimate loop 1's: means of three steps
        first, last = (sum(kl[loop] for kl in part) for part in (kls[:3], kls[-3:]))
        assert last < 0.8 * first


@pytest.mark.slow
def test_frozen_encoders_run_once_per_batch_and_with_all_its_pictures(own_model: Network):
    module, calls = loops(own_model), Counter()
    own_model.internvl.model.vision_tower.register_forward_hook(lambda m, i, o: calls.update(vision=1))
    own_model.sam2.image_encoder.register_forward_hook(lambda m, i, o: calls.update(sam=1))
    torch.manual_seed(0)
    compute(module, batch(own_model))
    assert calls == {"vision": 1, "sam": 1}


@pytest.mark.slow
def test_the_log_probabilities_are_those_of_the_distribution_that_was_sampled_from(own_model: Network):
    """Packed answers against the prompt as `generate` sees it, with the temperature; and against what
    sampling noted itself."""
    module = loops(own_model, temperature=0.7)
    step = a_round(module)
    requests = [caption_request(s, true_mask(s)) for s in SAMPLES]
    with torch.no_grad():
        prompted = prompt(own_model, requests, step.encoded.vision)
        said = sample_answers(step, requests, "captions")
        done = text_loop.experience_of(step, requests, said)
        packed, hidden, _ = hidden_states(step, done.groups, done.regions)
        logps, _ = rollout.token_logps(own_model, packed, hidden, step.reader)
        expected = []
        for i, answer in enumerate(said):
            own, ids = tiny.embeds_of(prompted, i // 3), torch.tensor(answer.ids)
            whole = torch.cat([own, own_model.internvl.get_input_embeddings()(ids)])[None]
            states = own_model.internvl.model.language_model(inputs_embeds=whole).last_hidden_state[0]
            logits = own_model.internvl.lm_head(states[len(own) - 1 : -1]) / 0.7
            logits[:, own_model.image_token_id] = -torch.inf
            expected.append(logits.log_softmax(-1)[torch.arange(len(ids)), ids])
    assert (logps - torch.cat(expected)).abs().max() < 1e-4
    assert (logps - torch.tensor([p for answer in said for p in answer.logps])).abs().max() < 1e-4
    assert compute(module, batch(own_model))[1]["loop1/sampling_gap"] < 1e-4


@pytest.mark.slow
def test_a_sampled_image_token_does_not_stop_the_training(own_model: Network):
    """Its slot would have no picture to be filled with: such tokens are not sampled at all, however likely
    the model finds them."""
    with torch.no_grad():
        own_model.internvl.lm_head.weight.zero_()
    module = loops(own_model, group=8, max_tokens=24)
    for step in range(4):
        torch.manual_seed(step)
        loss, found = compute(module, batch(own_model, step))
        assert loss.isfinite()
        assert found["loop1/entropy"] > 0


@pytest.mark.slow
def test_policy_teacher_and_reference_each_do_their_own_part(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    module, read, spoken = loops(own_model), [], []
    hidden, decode = own_model.hidden_states, rollout.decode

    def reading(*args: object) -> Tensor:
        read.append(module.policies.active)
        return hidden(*args)  # type: ignore[arg-type]

    def speaking(*args: object, **words: object) -> Tensor:
        spoken.append(module.policies.active)
        return decode(*args, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(own_model, "hidden_states", reading)
    for caller in (rollout, generation):
        monkeypatch.setattr(caller, "decode", speaking)
    torch.manual_seed(0)
    compute(module, batch(own_model))
    assert spoken == ["policy", "teacher"]  # captions of loop 1, captions of the drawn masks of loop 2
    # both loops act, are referred to, are learned
    assert read == ["teacher", "policy", "reference", "reference", "policy", "policy"]


def test_every_token_has_the_advantage_of_its_own_caption(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    ids = [(5, 6), (7,), (8, 9, 10), (11,), (12, 13), (14,)]
    said = [rollout.SampledAnswer(ids=i, logps=(0.0,) * len(i), complete=True) for i in ids]
    module, seen = (
        loops(own_model, loops={"caption": 1.0}, scale_rewards="none", rewards_caption={"iou": 1.0}),
        [],
    )
    policy_loss = grpo.policy_loss

    def watching(
        logps: Tensor, behaviour: Tensor, advantage: Tensor, *args: object, **words: object
    ) -> tuple[Tensor, dict[str, float]]:
        seen.append(advantage)
        return policy_loss(logps, behaviour, advantage, *args, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(caption_loop, "sample_answers", lambda *args: said)
    monkeypatch.setattr(
        caption_loop,
        "score",
        lambda *args, **words: {"iou": torch.tensor([[0.0, 1.0, 2.0], [10.0, 20.0, 60.0]])},
    )
    monkeypatch.setattr(grpo, "policy_loss", watching)
    compute(module, batch(own_model))
    assert seen[0].tolist() == [-1, -1, 0, 1, 1, 1, -20, -10, -10, 30]


@pytest.mark.slow
def test_the_extra_state_comes_back(own_model: Network):
    module = loops(own_model)
    torch.manual_seed(0)
    loss, _ = compute(module, batch(own_model))
    loss.backward()
    torch.optim.AdamW([p for p in own_model.parameters() if p.requires_grad], lr=1e-2).step()
    module.after_step(0)
    again = loops(tiny.build())
    again.set_extra_state(module.get_extra_state())
    assert (again.exploration, again.updates, again.record) == (module.exploration, 1, module.record)
    ours, theirs = module.policies.tensors("teacher"), again.policies.tensors("teacher")
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert set(module.record) == {"loop1/iou", "loop1/meteor", "loop2/iou", "loop2/meteor"}
    assert all(len(steps) == 1 and len(steps[0]) == 6 for steps in module.record.values())


def test_rewards_are_those_of_the_sample_the_rollout_belongs_to(own_model: Network):
    """Captions right for sample 0 and wrong for sample 1, masks the other way round."""
    step = a_round(loops(own_model, group=2))
    texts = ["a red square.", "zzz", "zzz", "zzz"]
    masks = [tiny.square(60, 60, 64, 64)] * 2 + [true_mask(SAMPLES[1]), tiny.square(24, 24, 60, 42)]
    sure = [0.9, 0.8, 0.7, 0.6]
    drawn = [
        MaskPrediction(text=t, masks=((m,),), confidence=c)
        for t, m, c in zip(texts, masks, sure, strict=True)
    ]
    parts = score(step, drawn, ("iou", "meteor", "confidence"))
    assert parts["iou"].tolist() == [[0.0, 0.0], [1.0, 0.5]]
    assert parts["meteor"].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert parts["confidence"].flatten().tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert set(score(step, [Prediction(text=t) for t in texts], ("meteor",))) == {"meteor"}


def test_true_answers_earn_every_reward_in_full(own_model: Network):
    step = a_round(loops(own_model, group=2))
    truth = [
        MaskPrediction(text=s.text, masks=((true_mask(s),),)) for s in step.batch.samples for _ in range(2)
    ]
    assert len(REWARDS) > 5
    assert all(values.eq(1).all() for values in score(step, truth, REWARDS).values())


def test_soft_iou_is_that_of_the_probabilities_drawn(own_model: Network):
    step = a_round(loops(own_model, group=2))
    drawn = inverse_masks(step, [s.text for s in step.batch.samples for _ in range(2)])
    soft = score(step, drawn, ("soft_iou",))["soft_iou"]
    assert ((soft > 0) & (soft < 1)).all()
    assert soft.flatten().tolist() == pytest.approx([one.soft_iou for one in drawn])


def test_a_caption_that_a_group_says_twice_is_drawn_once_and_as_by_itself(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    step = a_round(loops(own_model, group=3))
    decode, drawn = own_model.sam2.decode, list[int]()

    def counted(features: object, rows: Tensor, embeddings: Tensor) -> object:
        drawn.append(len(embeddings))
        return decode(features, rows, embeddings)  # type: ignore[arg-type]

    monkeypatch.setattr(own_model.sam2, "decode", counted)
    red, green = "a red square", "a small green square"
    together = inverse_masks(step, [red, green, red, green, green, green])
    assert drawn == [3]
    alone = [inverse_masks(step, [text] * 6) for text in (red, green)]
    expected = [alone[0][0], alone[1][1], alone[0][2], *alone[1][3:]]
    assert (
        [one.text for one in together]
        == [one.text for one in expected]
        == [red, green, red, green, green, green]
    )
    assert [one.masks for one in together] == [one.masks for one in expected]
    assert together[0].masks != together[3].masks  # of another picture
    for name in ("confidence", "soft_iou"):
        assert [getattr(one, name) for one in together] == pytest.approx(
            [getattr(one, name) for one in expected]
        )


def test_every_sample_of_an_epoch_comes_once_over_steps_and_processes(monkeypatch: pytest.MonkeyPatch):
    alone = [rows_of(8, step, batch=4, seed=0) for step in range(4)]
    assert sorted(alone[0] + alone[1]) == sorted(alone[2] + alone[3]) == list(range(8))
    assert alone[0] + alone[1] != alone[2] + alone[3]
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        shared += [i for micro in (0, 1) for i in own_share(alone[1], micro=micro, micros=2)]
    assert sorted(shared) == sorted(alone[1])


def test_a_sample_that_stands_in_a_step_twice_rolls_out_in_two_ways(own_model: Network):
    first, second = SAMPLES
    samples = (first, second, first)
    assert repeats_of(samples) == [0, 0, 1]
    module = loops(own_model)
    made = rl_batch(samples, [s.text for s in samples], own_model, mask_size=32, repeats=repeats_of(samples))
    step = module._rollout_steps(replace(batch(own_model), batches=[made]))["caption"]
    answers = [
        said.ids
        for said in sample_answers(step, [caption_request(s, true_mask(s)) for s in samples], "caption")
    ]
    assert answers[:3] != answers[6:]
    assert step.take([2, 1]).seed("caption", 0, 0) == step.seed("caption", 2, 0)
    requests = [caption_request(s, true_mask(s)) for s in SAMPLES]
    alone = sample_answers(a_round(module), requests, "caption")
    assert answers[:6] == [said.ids for said in alone]


def test_expressions_belong_to_the_region_with_their_picture_and_mask() -> None:
    square, other = ((tiny.square(8, 8, 24, 24),),), ((tiny.square(24, 24, 60, 60),),)
    referring = [
        tiny.sample(0, text="the left one", masks=square),
        tiny.sample(0, text="the red one", masks=square),
        tiny.sample(0, text="the green one", masks=other),
        tiny.sample(1, text="another picture's", masks=square),
        tiny.sample(0, text="both", masks=square + other),
        tiny.sample(0, text="none", masks=()),
    ]
    regions = [tiny.region(0, masks=square), tiny.region(1, masks=other)]
    assert Expressions(regions, Joined([regions, referring]))[:] == [["the left one", "the red one"], []]
    others = [
        tiny.clip(1),
        tiny.clip(2, masks=((None, *tiny.clip().masks[0][1:]),)),
        tiny.sample(3, masks=((None,),)),
    ]
    assert Expressions(regions, Joined([others, referring]))[:] == [["the left one", "the red one"], []]


@pytest.mark.slow
def test_loop_2_draws_what_is_asked_and_is_judged_by_the_caption(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, judged = loops(own_model, loops={"mask": 1.0}, rewards_mask={"meteor": 1.0}), []
    module.rewards = {"meteor": lambda answer, truth: judged.append(truth.text) or 0.0}
    captions = [s.text for s in SAMPLES]
    losses = []
    for asked in (tuple(captions), ("the red one", "the left one")):
        losses.append(float(compute(module, batch(own_model, asked=asked))[0].detach()))
    assert set(judged) == set(captions)
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_the_gradient_is_the_weighted_sum_of_the_loops(own_model: Network) -> None:
    module = loops(own_model, mask_weight=0.0)

    def gradient(**weights: float) -> Tensor:
        module.settings, module.exploration = (
            module.settings.model_copy(update={"loops": weights}),
            dual_loop.Exploration(width=0.5),
        )
        module.zero_grad()
        torch.manual_seed(0)
        compute(module, batch(own_model))[0].backward()
        return torch.cat([g.flatten() for name, g in sorted(gradients(module).items()) if "lora_B" in name])

    caption, mask = gradient(caption=1.0), gradient(mask=1.0)
    assert caption.abs().max() > 1e-6
    assert mask.abs().max() > 1e-6
    # of some 4e-3
    assert torch.allclose(gradient(caption=0.5, mask=3.0), 0.5 * caption + 3.0 * mask, rtol=1e-3, atol=1e-6)


# The loops as measurements


@pytest.mark.parametrize(
    ("caption", "expression"),
    [
        ("a red square.", "the red square"),
        ("an old man", "the old man"),
        ("the cat.", "the cat"),
        ("two dogs", "two dogs"),
        ("another", "another"),
    ],
)
def test_a_caption_is_asked_for_with_the_definite_article(caption: str, expression: str):
    assert expression_of(caption) == expression


def test_both_loops_are_closed_by_the_inverse_model():
    """`ask` says the right words and draws the left half of the mask; the inverse draws the left half, and
    says what it is shown."""
    sample = tiny.region(0, "a red square", masks=((tiny.square(0, 0, 32, 32),),))
    half = tiny.square(0, 0, 16, 32)

    def asking(requests: list[Request]) -> list[Prediction]:
        return [
            Prediction(text="a red square.", masks=() if r.mask_prompts else ((half,),)) for r in requests
        ]

    def inverse(requests: list[Request]) -> list[Prediction]:
        for r in requests:
            assert r.mask_prompts == (half,) or r.text == prompts.REFERRING_EVAL.format(text="the red square")
        return [
            Prediction(text="a red square.", masks=() if r.mask_prompts else ((half,),)) for r in requests
        ]

    found = averages(loop_scores([sample], ask=asking, inverse=inverse))
    assert found[0] == ("loop1", "IoU", pytest.approx(0.5))
    assert found[1][:2] == ("loop2", "METEOR")
    assert found[1][2] > 0.9


def test_the_truth_is_what_the_inverse_makes_of_true_captions_and_masks():
    """An inverse that says and draws what it is shown has nothing against the truth; one that halves every
    mask takes half of loop 1."""
    sample = tiny.region(0, "a red square", masks=((tiny.square(0, 0, 32, 32),),))

    def halving(requests: list[Request]) -> list[Prediction]:
        assert all(r.mask_prompts == (true_mask(sample),) or "the red square" in r.text for r in requests)
        return [
            Prediction(text="a red square.", masks=() if r.mask_prompts else ((tiny.square(0, 0, 16, 32),),))
            for r in requests
        ]

    (_, _, iou), (_, _, meteor) = averages(loop_scores_of_truth([sample], inverse=halving))
    assert iou == pytest.approx(0.5)
    assert meteor > 0.9


@pytest.mark.slow
def test_the_words_around_a_mask_are_held_to_the_reference(own_model: Network):
    """A policy that has come to deny what is asked for: the words' KL is above zero, and its gradient alone
    leads back."""
    module = loops(own_model, loops={"mask": 1.0}, kl_words=1.0, kl=0.0, mask_weight=0.0)
    torch.manual_seed(0)
    _, before = compute(module, batch(own_model))
    assert before["loop2/words_kl"] == pytest.approx(0.0, abs=1e-4)
    with torch.no_grad():
        for name, p in own_model.named_parameters():
            if ".policy." in name and "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1), std=0.3)
    found = []
    optimizer = torch.optim.Adam(
        [p for n, p in own_model.named_parameters() if ".policy." in n and "lora_" in n], lr=0.02
    )
    for _ in range(8):
        torch.manual_seed(0)
        loss, metrics = compute(module, batch(own_model))
        found.append(metrics["loop2/words_kl"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found[0] > 0.01
    assert found[-1] < 0.5 * found[0]


def test_an_empty_mask_earns_nothing_in_either_loop():
    def silent(requests: list[Request]) -> list[Prediction]:
        return [Prediction(text="a red square") for _ in requests]

    found = averages(loop_scores([tiny.region(0), tiny.region(1)], ask=silent, inverse=silent))
    assert [value for *_, value in found] == [0.0, 0.0]


def test_a_mask_is_asked_for_in_the_words_of_the_referring_benchmark():
    assert mask_request(tiny.region(0), "a cat.").text == "<image>\nPlease segment the cat in this image."


def test_a_run_without_any_gradient_says_that_all_rewards_were_equal() -> None:
    curves = [(0, "loss", 0.1), (0, "grad_norm", 0.0), (1, "grad_norm", 0.0)]
    with pytest.raises(RuntimeError, match=r"all answers of each group had the same reward"):
        check_learned(curves)
    check_learned([*curves, (2, "grad_norm", 0.1)])


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 6, 64])
def test_micro_batches_act_together_as_they_do_apart(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Four micro-batches of one sample, three answers each, are sampled in one call, or in as many as
    `answers_at_once` asks for."""
    sampled: list[int] = []
    sample = rollout.sample

    def counted(model: Network, prompted: object, **options: object) -> object:
        sampled.append(len(options["seeds"]))  # type: ignore[arg-type]
        return sample(model, prompted, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("ans_core.rl.asking.sample", counted)
    found = []
    for limit in (1, at_once):
        module = loops(tiny.build(), loops={"caption": 1.0}, answers_at_once=limit)
        micros = [
            replace(batch(module.model, samples=(SAMPLES[i % 2],), of=("caption",)), micro=i)
            for i in range(4)
        ]
        torch.manual_seed(0)
        loss, _ = compute(module, *micros)
        found.append((float(loss.detach()), dict(module.record)))
    apart, together = sampled[:4], sampled[4:]
    assert apart == [3] * 4
    assert together == {1: [3] * 4, 6: [6, 6], 64: [12]}[at_once]
    assert found[0][1] == found[1][1]  # every rollout's rewards
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4, abs=1e-6)


def test_processes_with_unlike_shares_group_their_micro_batches_alike(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three answers each: of shares (2, 2, 1) and (2, 1, 1) both act twice, for they wait for each other in
    every group."""
    settings = SETTINGS.model_copy(update={"answers_at_once": 12})
    monkeypatch.setattr(dual_loop, "largest", lambda value, device: 2)  # of both processes
    for shares in ((2, 2, 1), (1, 1, 1)):
        micros = [
            replace(batch(own_model, samples=SAMPLES[:share]), micro=i) for i, share in enumerate(shares)
        ]
        assert [len(some) for some in dual_loop.grouped(micros, settings, own_model.device)] == [2, 1]
