"""Masks that a model draws from captions without any, and the words of each that it learns from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.data.conversation import sentence
from ans_core.inference.decoding import decode
from ans_core.inference.generation import stopping
from ans_core.inference.prefill import prompt
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.rl import self_masks as own
from ans_core.rl.batch import rl_batch
from ans_core.rl.drawing import drawn
from ans_core.rl.self_captions import UnreadableError, encoded
from ans_core.types import Sample
from tests import tiny

OPTIONS = own.MaskOptions()


def phrase(seed: int, text: str, name: str) -> Sample:
    return replace(tiny.region(seed, text, sample_id=name), task="phrase", masks=())


PHRASES = (
    phrase(0, "A small red square at the top.", "a"),
    phrase(0, "a large red circle at the top", "b"),
    phrase(1, "a green square", "c"),
)
OTHERS = ([PHRASES[1].text], [PHRASES[0].text], ["a green circle at the left", "a blue square"])
TAKEN = [own.words_of(PHRASES[1].text)]


def test_words_are_chosen_that_no_other_phrase_of_the_picture_has_all_of():
    choices = own.choices_of(PHRASES[0], TAKEN, OPTIONS)
    assert len({*choices}) == OPTIONS.choices
    words = ["the", "small", "red", "square", "at", "the", "top"]
    for choice in choices:
        some = choice.split()
        places = iter(words)
        assert all(word in places for word in some)  # in their order
        assert len(some) < len(words)
        assert {"small", "square"} & {*some}
    assert own.choices_of(PHRASES[0], TAKEN, OPTIONS) == choices
    assert own.choices_of(PHRASES[0], TAKEN, replace(OPTIONS, seed=1)) != choices
    assert own.choices_of(replace(PHRASES[0], sample_id="d"), TAKEN, OPTIONS) != choices
    assert own.choices_of(PHRASES[0], [own.words_of(PHRASES[0].text)], OPTIONS) == []
    assert own.choices_of(phrase(0, "circle", "e"), [own.words_of("a square")], OPTIONS) == []
    assert own.choices_of(PHRASES[0], [], OPTIONS) == []
    assert own.choices_of(phrase(0, "What is red and round?", "f"), TAKEN, OPTIONS) == []


def test_the_hardest_words_are_those_that_draw_something_else():
    whole = torch.full((8, 8), -1.0)
    whole[:4] = 1.0
    half, other = whole.clone(), -whole
    half[2:4] = -1.0
    masks = {"same": whole, "other": other, "half": half}
    assert own.hardest(masks, whole, replace(OPTIONS, hardest=2)) == ["other", "half"]
    assert own.hardest({}, whole, OPTIONS) == []


def test_masks_depend_on_the_phrase_alone_and_are_those_of_the_whole_caption(own_model: Network):
    together = own.self_masks(own_model, PHRASES, OTHERS, OPTIONS)
    assert all(together)
    for one, sample, others in zip(together, PHRASES, OTHERS, strict=True):
        (alone,) = own.self_masks(own_model, [sample], [others], OPTIONS)
        assert one
        assert alone
        assert (one.mask, one.expressions) == (alone.mask, alone.expressions)
        assert one.fit == pytest.approx(alone.fit, abs=1e-4)
        assert 2 <= len(one.expressions) <= 4
        seen = encoded(own_model, rl_batch([sample], [""], own_model, mask_size=1))
        with torch.no_grad():
            (logits,) = drawn(seen, [[sample.text]])[1]
        assert rle.area(one.mask) == pytest.approx(int((logits > 0).sum()) * (64 / len(logits)) ** 2, rel=0.2)


def test_a_mask_fits_as_its_caption_is_likely_as_an_answer(own_model: Network):
    """Against decoding with a cache, token by token, of an answer that is forced."""
    region = tiny.region(0, "a small red square", sample_id="a")
    ids = own_model.tokenizer.encode(sentence(region.text), add_special_tokens=False)
    logps = []

    def forced(logits: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        token = torch.tensor([ids[min(int(count), len(ids) - 1)]])
        if int(count) < len(ids):
            logps.append(float(logits.float().log_softmax(1)[0, token]))
        return token

    with torch.no_grad():
        seen = encoded(own_model, rl_batch([region], [""], own_model, mask_size=1))
        (fit,) = own._fits(own_model, seen, [0], [true_mask(region)])
        request = caption_request(region, true_mask(region))
        decode(
            own_model, prompt(own_model, [request]), answers=1, max_tokens=len(ids), choose=forced,
            **stopping(own_model),
        )  # fmt: skip
    assert fit == pytest.approx(sum(logps) / len(ids), abs=1e-4)


def test_what_is_not_drawn_or_not_clear_has_no_mask_and_a_broken_picture_is_said(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    shown = own_model.sam2.shown
    monkeypatch.setattr(own_model.sam2, "shown", lambda out: shown(out).clamp(max=-1.0))
    assert own.self_masks(own_model, PHRASES, OTHERS, OPTIONS) == [None] * 3
    monkeypatch.undo()
    same = [["a small red square at the top left"], [PHRASES[0].text], ["a red square"]]
    assert [bool(one) for one in own.self_masks(own_model, PHRASES, same, OPTIONS)] == [False, True, True]
    asking = [phrase(0, "What is red and round?", "d"), phrase(0, "...", "e")]
    assert own.self_masks(own_model, asking, OTHERS[:2], OPTIONS) == [None, None]
    broken = replace(PHRASES[0], frames=(tiny.picture(0)[:200],))
    with pytest.raises(UnreadableError):
        own.self_masks(own_model, [broken], [[]], OPTIONS)
