"""Captions that a model gives masks without words, and chooses by what it draws from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.inference.generation import stop_ids
from ans_core.inference.prefill import PrefilledBatch, prompt
from ans_core.model.network import Network
from ans_core.pictures import media, rle, transforms
from ans_core.rl import self_captions as own
from ans_core.rl.batch import rl_batch
from ans_core.rl.drawing import inverse_masks
from ans_core.types import Sample
from tests import tiny
from tests.rl.test_dual_loop import a_round, loops

OPTIONS = own.CaptionOptions(samples=8, max_tokens=60, choices=2, kl=5.0, min_p=1e-6)
REGIONS = (
    tiny.region(0, "", sample_id="a"),
    tiny.region(1, "", sample_id="b", masks=((tiny.square(24, 24, 60, 60),),)),
    tiny.region(2, "", sample_id="c"),
)


@pytest.fixture
def talker(own_model: Network) -> Network:
    """A model that says twenty letters and the end with about the same chance, other tokens seldom."""
    own_model.internvl.lm_head.weight.mul_(0.1)
    letters = own_model.tokenizer.encode("abcdefghijklmnopqrst", add_special_tokens=False)
    logits, said = own_model.logits, [*letters, stop_ids(own_model)[0]]

    def biased(states: torch.Tensor) -> torch.Tensor:
        made = logits(states)
        made[..., said] += 4.0
        return made

    own_model.logits = biased  # type: ignore[method-assign]
    return own_model


def prompted(model: Network, regions: Sequence[Sample] = REGIONS) -> PrefilledBatch:
    return prompt(model, [caption_request(region, true_mask(region)) for region in regions])


@pytest.mark.slow
def test_captions_depend_on_the_seed_and_the_region_alone(talker: Network):
    together = own.self_captions(talker, REGIONS, OPTIONS)
    alone = [own.self_captions(talker, [region], OPTIONS)[0] for region in REGIONS]
    assert [c and c.text for c in together] == [c and c.text for c in alone]
    assert [c and c.iou for c in together] == pytest.approx([c and c.iou for c in alone], abs=1e-5)
    assert any(together)
    sampled = own._sampled(talker, prompted(talker), REGIONS, OPTIONS)
    assert all(len(some) > 1 for some in sampled)
    assert not any("[SEG]" in text or "<" in text for some in sampled for text in some)
    other = own._sampled(talker, prompted(talker), REGIONS, replace(OPTIONS, seed=1))
    assert other != sampled


def test_what_is_drawn_is_what_the_inverse_model_of_rl_draws(own_model: Network):
    module = loops(own_model)
    step = a_round(module)
    texts = ["a red square", "a small green square", "red"]
    seen = own.encoded(own_model, step.batch)
    with module.policies.using("reference"):
        drawn = own.drawn_ious(seen, [texts, texts])
        masks = inverse_masks(step, texts * 2)
    targets = step.batch.targets.numpy()
    expected = []
    for i, prediction in enumerate(masks):
        (masklet,) = prediction.masks
        shown = tiny_mask(masklet[0], side=targets.shape[-1])
        target = targets[i // 3]
        expected.append((shown & target).sum() / max(1, (shown | target).sum()))
    # masks of 64 pixels brought to 32, where RL's are compared at the picture's own size
    assert [iou for some in drawn for iou in some] == pytest.approx(expected, abs=0.03)
    assert len({round(iou, 3) for iou in expected}) > 1


def tiny_mask(mask: object, *, side: int) -> np.ndarray:
    full = rle.decode(mask)  # type: ignore[arg-type]
    return np.asarray(Image.fromarray(full).resize((side, side), Image.Resampling.NEAREST), dtype=bool)


def test_the_turned_picture_shows_the_same_thing_turned(own_model: Network):
    batch = rl_batch(REGIONS, [""] * 3, own_model, mask_size=32)
    turned = own._turned(batch, own_model)
    by_hand = [
        replace(
            region,
            frames=(
                media.png(transforms.open_image(region.frames[0]).transpose(Image.Transpose.ROTATE_180)),
            ),
        )
        for region in REGIONS
    ]
    expected = rl_batch(by_hand, [""] * 3, own_model, mask_size=32)
    assert (turned.pixels == expected.pixels).all()
    assert (turned.targets == batch.targets.flip((1, 2))).all()
    assert all((a.pixels == b.pixels).all() for a, b in zip(turned.views, expected.views, strict=True))


def test_values_are_the_ridge_regression_of_what_words_find():
    """By hand: x is 1 with token 5 and 0 without, y is .8 and .2; centred x'x is 1 and x'y .6 (of four choices,
    two with it), so that the value is .6 / (1 + ridge)."""
    choices, ious = [{5}, {5}, set[int](), set[int]()], [0.8, 0.8, 0.2, 0.2]
    assert own.token_values(choices, ious, [{5}], ridge=0.0) == pytest.approx(
        {5: 0.0}
    )  # the mean of the texts
    values = own.token_values(choices, ious, [{5}, {6}], ridge=1.0)
    assert values == pytest.approx({5: 0.15, 6: -0.15})
    assert own.token_values([], [], [], ridge=1.0) == {}


def test_a_word_that_finds_the_thing_in_both_pictures_is_worth_most():
    """A listener that knows `red` everywhere, `left` in half of what it is shown: with the words of three samples
    none of which says both `red` and `square`, whose values add up."""
    texts = ("a blue square", "a red circle", "a red thing left", "a blue thing left")
    ids = {word: number for number, word in enumerate(dict.fromkeys(" ".join(texts).split()))}
    options = own.CaptionOptions(choices=40)
    choices = own.choices_of(texts, REGIONS[0], options)
    ious = [
        0.5 * ("red" in c.split()) + 0.3 * ("square" in c.split()) + 0.2 * ("left" in c.split())
        for c in choices
    ]
    values = own.token_values(
        [{ids[w] for w in c.split()} for c in choices],
        ious,
        [{ids[w] for w in t.split()} for t in texts],
        ridge=2.0,
    )
    worth = {word: values[number] for word, number in ids.items()}
    assert worth["red"] - worth["blue"] == pytest.approx(0.5, abs=0.08)
    assert worth["square"] - worth["circle"] == pytest.approx(0.3, abs=0.08)
    assert sorted(worth, key=worth.__getitem__)[-3:] == ["left", "square", "red"]
    assert len(set(choices)) > 12
    assert len(choices) == 40 * len(texts)
    assert all(choice for choice in own.choices_of(["word"], REGIONS[0], options))


def test_value_wins_among_the_tokens_that_the_model_finds_likely():
    logits = torch.tensor([[0.5, 0.3, 0.195, 0.005]] * 3).log()
    bonus = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0], [0.0, 0.6, 0.0, 100.0]])
    assert own.most_valued(logits, bonus, min_p=0.02).tolist() == [0, 2, 1]


def test_words_of_value_are_said_once_each_and_a_caption_that_does_not_end_is_none(talker: Network):
    words = talker.tokenizer.encode(" red left", add_special_tokens=False)
    end = stop_ids(talker)[0]
    assert len({*words, end}) == len(words) + 1
    values = {token: 300.0 - 10 * place for place, token in enumerate(words)}
    both = prompted(talker, REGIONS[:2])
    ending, endless = own._written(talker, both, [values | {end: 200.0}, values | {end: -500.0}], OPTIONS)
    assert ending == talker.tokenizer.decode(words)
    assert endless == ""


def test_a_region_without_a_word_has_no_caption(talker: Network, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own, "_sampled", lambda *arguments: [["a red square"], [], ["it"]])
    found = own.self_captions(talker, REGIONS, OPTIONS)
    assert found[1] is None


@pytest.mark.slow
def test_weights_in_half_precision_caption_too(talker: Network):
    talker.to(torch.bfloat16).norms_in_fp32()  # as checkpoint.load does
    found = own.self_captions(talker, REGIONS, OPTIONS)
    assert any(found)
    assert all(0 <= one.iou <= 1 for one in found if one is not None)


def test_a_picture_of_several_regions_is_encoded_once_and_each_region_as_if_alone(own_model: Network):
    two = [tiny.region(0, "", sample_id=name, masks=((box,),)) for name, box in (
        ("left", tiny.square(0, 0, 24, 24)), ("right", tiny.square(30, 0, 60, 24))
    )]  # fmt: skip
    batch = rl_batch([two[0], REGIONS[1], two[1]], [""] * 3, own_model, mask_size=32)
    encoded: list[int] = []
    encode = own_model.sam2.encode

    def counts(pixels: torch.Tensor) -> object:
        encoded.append(len(pixels))
        return encode(pixels)

    own_model.sam2.encode = counts  # type: ignore[method-assign,assignment]
    texts = ["a red square", "left"]
    together = own.drawn_ious(own.encoded(own_model, batch), [texts] * 3)
    assert encoded == [2]
    for number in range(3):
        alone = own.drawn_ious(own.encoded(own_model, batch.take([number])), [texts])
        assert together[number] == pytest.approx(alone[0], abs=1e-5)
