"""Rewards on held-out samples: greedy answers, the first model as the inverse, each sample counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ans_core.benchmarks import BENCHMARKS
from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.inference.predict import predict
from ans_core.metrics.mask import counts
from ans_core.metrics.meteor import meteor
from ans_core.model.network import Network
from ans_core.precision import autocast
from ans_core.rl import caption_loop, dual_loop
from ans_core.rl.drawing import inverse_masks
from ans_core.rl.dual_loop import DualLoop
from ans_core.rl.experience import Experience
from ans_core.rl.step import RolloutStep
from ans_core.rl.validation import HeldOutRewards
from ans_core.types import Sample
from tests import tiny
from tests.rl.test_dual_loop import loops

REGIONS = tuple(
    tiny.region(i, text, masks=((tiny.square(4 * i, 8, 4 * i + 30, 40),),))
    for i, text in enumerate(("a red square", "a small green square", "a blue circle"))
)
EXPRESSIONS = (
    *(replace(sample, task="referring") for sample in REGIONS),
    replace(REGIONS[0], task="referring", text="a cat", sample_id="absent", masks=()),
)
SAMPLES = {"caption": REGIONS, "mask": REGIONS, "refer": EXPRESSIONS}


def moved(model: Network, adapter: str, seed: int = 0, std: float = 0.1) -> None:
    """Make an adapter differ from what RL began with."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if f".{adapter}." in name and "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(seed), std=std)


@pytest.fixture
def module(own_model: Network) -> DualLoop:
    built = loops(own_model, loops={"caption": 1.0, "mask": 0.5, "refer": 2.0})
    moved(own_model, "policy")
    return built


def measured(module: DualLoop, batch: int = 2, **samples: tuple[Sample, ...]) -> dict[str, float]:
    precision = autocast(torch.device("cpu"), torch.float32)
    return HeldOutRewards(module, samples or SAMPLES, batch=batch, mask_size=32, autocast=precision).measure()


def test_captions_are_the_greedy_ones_and_the_first_model_draws_them(
    module: DualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[str], RolloutStep]] = []
    act = caption_loop.LOOP.act

    def noted(step: RolloutStep) -> Experience:
        done = act(step)
        seen.append((done.texts, step))
        return done

    monkeypatch.setitem(dual_loop.LOOPS, "caption", replace(caption_loop.LOOP, act=noted))
    found = measured(module, batch=3, caption=REGIONS)
    ((texts, step),) = seen
    greedy = predict(
        module.model,
        [caption_request(sample, true_mask(sample)) for sample in REGIONS],
        batch=4,
        max_tokens=module.settings.max_tokens,
    )
    assert texts == [answer.text for answer in greedy]
    assert len(set(texts)) > 1
    moved(module.model, "policy", std=0.0)  # what RL began with
    by_policy = replace(step, settings=step.settings.model_copy(update={"inverse": "policy"}))
    drawn = inverse_masks(by_policy, texts)
    ious = [
        counts(prediction.masks[0][0] or {}, true_mask(sample)).iou
        for prediction, sample in zip(drawn, REGIONS, strict=True)
    ]
    words = [meteor(text.rstrip("."), [sample.text]) for text, sample in zip(texts, REGIONS, strict=True)]
    assert found["loop1/reward/iou"] == pytest.approx(sum(ious) / 3)
    assert found["loop1/reward/meteor"] == pytest.approx(sum(words) / 3, abs=1e-6)
    assert found["loss"] == pytest.approx(1 - found["loop1/reward"] / 2)


@pytest.mark.slow
def test_neither_the_teacher_nor_chance_changes_what_is_measured(module: DualLoop) -> None:
    """The training's own inverse is the teacher here; its exploration stays as it was."""
    assert module.settings.inverse == "teacher"
    before = measured(module)
    exploration = dict(vars(module.exploration))
    moved(module.model, "teacher", seed=5)
    torch.manual_seed(7)
    assert measured(module) == before
    assert vars(module.exploration) == exploration
    moved(module.model, "policy", seed=6)
    assert measured(module) != before


@pytest.mark.slow
def test_each_sample_counts_once_however_many_are_read_at_once(module: DualLoop) -> None:
    alone = measured(module, batch=1)
    for batch in (2, 5):
        assert measured(module, batch=batch) == pytest.approx(alone, abs=1e-5)
    shares = (alone["loop1/reward"] / 2, alone["loop2/reward"] / 1.5, alone["refer/reward"])
    assert alone["loss"] == pytest.approx(1 - (shares[0] + 0.5 * shares[1] + 2 * shares[2]) / 3.5)


@pytest.mark.slow
def test_expressions_score_as_the_benchmark_scores_them(module: DualLoop) -> None:
    found = measured(module, refer=EXPRESSIONS)
    benchmark = BENCHMARKS["referring"]
    answers = predict(
        module.model,
        [benchmark.request(sample) for sample in EXPRESSIONS],
        batch=4,
        max_tokens=module.settings.max_tokens,
    )
    scored = benchmark.of_samples(list(EXPRESSIONS), answers).metrics
    # the reward is 1 where nothing is meant and nothing drawn; the benchmark counts these by themselves
    assert found["refer/reward/iou"] == pytest.approx((3 * scored["gIoU"] + scored["N_acc"]) / 4)
    assert found["refer/denied_if_absent"] == scored["N_acc"]
    assert "refer/denied_if_absent" not in measured(module, refer=EXPRESSIONS[:3])
