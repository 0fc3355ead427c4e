"""Captions that a model gives masks without words, and chooses by what it draws from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from ans_core.model.network import Network
from ans_core.pictures import media, rle, transforms
from ans_core.rl import self_captions as own
from ans_core.rl.batch import RlBatch, rl_batch
from ans_core.rl.drawing import inverse_masks
from tests import tiny
from tests.rl.test_dual_loop import a_round, loops

OPTIONS = own.CaptionOptions(samples=8, max_tokens=60, finalists=3, choices=2)
REGIONS = (
    tiny.region(0, "", sample_id="a"),
    tiny.region(1, "", sample_id="b", masks=((tiny.square(24, 24, 60, 60),),)),
    tiny.region(2, "", sample_id="c"),
)


@pytest.fixture
def talker(own_model: Network) -> Network:
    """A model that says all words with about the same chance, and so ends some answers."""
    own_model.internvl.lm_head.weight.mul_(0.1)
    return own_model


def said(model: Network) -> list[list[own.SelfCaption]]:
    batch = rl_batch(REGIONS, [""] * len(REGIONS), model, mask_size=32)
    return own._sampled(own._encoded(model, batch), OPTIONS)


def test_captions_depend_on_the_seed_and_the_region_alone(talker: Network):
    together = own.self_captions(talker, REGIONS, OPTIONS)
    alone = [own.self_captions(talker, [region], OPTIONS)[0] for region in REGIONS]
    assert [c and c.text for c in together] == [c and c.text for c in alone]
    assert [c and c.score for c in together] == pytest.approx([c and c.score for c in alone], abs=1e-5)
    assert any(together)
    assert not any("[SEG]" in one.text or "<" in one.text for some in said(talker) for one in some)
    other = own.self_captions(talker, REGIONS, replace(OPTIONS, seed=1))
    assert [c and c.text for c in other] != [c and c.text for c in together]


def test_what_is_drawn_is_what_the_inverse_model_of_rl_draws(own_model: Network):
    module = loops(own_model)
    step = a_round(module)
    texts = ["a red square", "a small green square", "red"]
    seen = own._encoded(own_model, step.batch)
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


def test_the_caption_is_chosen_from_which_parts_find_the_thing_where_places_mislead(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    """A listener that knows `red` everywhere, and `left` in the picture as it is alone: whole captions earn
    the same."""
    texts = ("a blue thing left", "a red thing left", "a red thing right", "a thing")
    likely = dict.fromkeys(texts, -1.0)

    def sampled(seen: own._Pictures, options: own.CaptionOptions) -> list[list[own.SelfCaption]]:
        return [[own.SelfCaption(text=text, logp=logp) for text, logp in likely.items()]]

    def listens(seen: own._Pictures, texts: Sequence[Sequence[str]]) -> list[list[float]]:
        place = "right" if is_turned(seen.batch) else "left"
        return [[float(bool({"red", place} & set(text.split()))) for text in some] for some in texts]

    def is_turned(batch: RlBatch) -> bool:
        return bool(batch.targets[0].numpy()[-1].any())

    monkeypatch.setattr(own, "_sampled", sampled)
    monkeypatch.setattr(own, "drawn_ious", listens)
    region = tiny.region(0, "", masks=((tiny.square(0, 0, 24, 24),),))
    (chosen,) = own.self_captions(own_model, [region], replace(OPTIONS, finalists=4, choices=8))
    assert chosen is not None
    assert "red" in chosen.text
    assert chosen.ious[0] == 1.0
    assert 0.5 < chosen.score <= 1.0
    assert 0 < chosen.gain < chosen.score
    likely["a thing"] = 1000.0  # so likely that what it is worth is nothing beside
    (chosen,) = own.self_captions(own_model, [region], replace(OPTIONS, finalists=1))
    assert chosen is not None
    assert (chosen.text, chosen.score, chosen.gain) == ("a thing", 0.0, 0.0)


def test_words_left_out_are_at_the_same_places_in_all_captions_of_a_mask():
    options = own.CaptionOptions(choices=20)
    region = REGIONS[0]
    one, other = (own.choices_of(text, region, options) for text in ("a b c d e", "1 2 3 4 5"))
    places = dict(zip("12345", "abcde", strict=True))
    assert ["".join(places.get(letter, letter) for letter in text) for text in other] == one
    assert len(set(one)) > 5
    assert all(text for text in own.choices_of("word", region, options))
    assert own.choices_of("a b c d e", REGIONS[1], options) != one


def test_a_region_without_a_word_has_no_caption(own_model: Network, monkeypatch: pytest.MonkeyPatch):
    sampled = [[own.SelfCaption(text=text, logp=-1.0)] if text else [] for text in ("a red square", "", "it")]
    monkeypatch.setattr(own, "_sampled", lambda seen, options: sampled)
    found = own.self_captions(own_model, REGIONS, OPTIONS)
    assert [caption is not None for caption in found] == [True, False, True]


def test_captions_far_shorter_than_the_others_are_left_out():
    texts = ("a", "a red square at the top", "a small red square", "red", "a red square on the left")
    captions = [own.SelfCaption(text=text, logp=-1.0) for text in texts]
    assert [one.text for one in own._not_short(captions)] == [text for text in texts if " " in text]
    assert own._not_short([]) == []


def test_weights_in_half_precision_caption_too(talker: Network):
    talker.to(torch.bfloat16).norms_in_fp32()  # as checkpoint.load does
    found = own.self_captions(talker, REGIONS, OPTIONS)
    assert any(found)
    assert all(0 <= one.score <= 1 for one in found if one is not None)


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
    together = own.drawn_ious(own._encoded(own_model, batch), [texts] * 3)
    assert encoded == [2]
    for number in range(3):
        alone = own.drawn_ious(own._encoded(own_model, batch.take([number])), [texts])
        assert together[number] == pytest.approx(alone[0], abs=1e-5)
