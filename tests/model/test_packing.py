"""Packed rows and batches: the same numbers as one conversation at a time."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from ans_core import prompts
from ans_core.data import collate as data
from ans_core.data.collate import Batch, Row, collate, collate_readable, encode_row, pack_row, pad_rows
from ans_core.data.conversation import Turn, turn
from ans_core.dist import read_together
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.model.packing import Packed, branch_attention
from ans_core.model.supervised import Supervised, image_tokens, packed
from ans_core.pictures import rle
from ans_core.rl import vqa_loop
from tests import tiny

TURNS = (
    Turn(
        question="Please segment the red square in this image.",
        answer="It is [SEG].",
        masks=((tiny.square(8, 8, 24, 24),),),
    ),
    Turn(question="Describe region1.", answer="A small green square.", regions=(tiny.square(0, 0, 40, 40),)),
    Turn(
        question="Where are both?",
        answer="[SEG] and [SEG]",
        masks=((tiny.square(0, 0, 8, 64),), (tiny.square(32, 0, 64, 8),)),
    ),
)


CHAT = tiny.sample(
    task="conversation", past=(("What is region1?", "a red square"),), question="Is it green?", text="no"
)


def answers(model: Network, batch: Batch) -> Tensor:
    """Logits that predict every learned token, row by row."""
    hidden = model.hidden_states(packed(batch), image_tokens(model, batch.views).split(batch.views))
    rows, places = batch.loss_mask.nonzero(as_tuple=True)
    return model.logits(hidden[rows, places - 1])


def text_only(
    model: Network, branches: list[tuple[list[int], list[int]]], prefix: list[int], pad_to: int = 0
) -> Tensor:
    rows = [pack_row(prefix, branches)] + [pack_row([1] * pad_to, [])] * bool(pad_to)
    fields = pad_rows(rows, pad_id=0)
    hidden = model.hidden_states(Packed(**fields), [None] * len(rows))
    at, place = fields["loss_mask"].nonzero(as_tuple=True)
    return hidden[at, place - 1]


def test_a_row_is_prefix_then_branches_that_each_continue_the_prefix():
    row = pack_row([7, 8], [([1], [2, 3]), ([4, 5], [6])])
    assert row.ids == [7, 8, 1, 2, 3, 4, 5, 6]
    assert row.positions == [0, 1, 2, 3, 4, 2, 3, 4]
    assert row.branches == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [i for i, learned in enumerate(row.learned) if learned] == [3, 4, 7]


def test_a_token_looks_at_the_prefix_and_its_own_branch_and_padding_at_itself():
    seen = branch_attention(torch.tensor([[0, 1, 1, 2, -1]]))[0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


def test_branches_of_text_give_the_hidden_states_of_separate_rows(tiny_model: Network):
    prefix, branches = [5, 6, 7], [([8, 9], [10, 11]), ([12], [13]), ([14, 15, 16], [17, 18, 19])]
    together = text_only(tiny_model, branches, prefix)
    alone = torch.cat([text_only(tiny_model, [b], prefix) for b in branches])
    assert together.shape == (6, 32)
    assert together.std() > 0.1
    assert (together - alone).abs().max() < 1e-5


def test_padding_changes_nothing(tiny_model: Network):
    branches = [([8, 9], [10, 11]), ([12], [13])]
    one = text_only(tiny_model, branches, [5, 6])
    assert (one - text_only(tiny_model, branches, [5, 6], pad_to=30)).abs().max() < 1e-5


@pytest.mark.slow
def test_questions_of_one_picture_packed_into_a_row_give_the_logits_of_a_row_each(tiny_model: Network):
    layout = tiny.layout(tiny_model)
    together = answers(tiny_model, collate([tiny.row(*TURNS)], tiny_model.tokenizer, layout))
    alone = [answers(tiny_model, collate([tiny.row(t)], tiny_model.tokenizer, layout)) for t in TURNS]
    assert (together - torch.cat(alone)).abs().max() < 1e-5 * together.abs().max()
    swapped = answers(tiny_model, collate([tiny.row(*TURNS, number=1)], tiny_model.tokenizer, layout))
    assert (together - swapped).abs().max() > 1e-2  # it does look at the picture


def test_a_batch_of_rows_gives_the_logits_of_its_rows(tiny_model: Network):
    layout = tiny.layout(tiny_model)
    rows = [tiny.row(*TURNS), tiny.row(TURNS[1], number=1), tiny.row(TURNS[0], number=2)]
    together = answers(tiny_model, collate(rows, tiny_model.tokenizer, layout))
    alone = torch.cat([answers(tiny_model, collate([r], tiny_model.tokenizer, layout)) for r in rows])
    assert (together - alone).abs().max() < 1e-5 * together.abs().max()


def test_the_region_that_is_shown_changes_the_answer(tiny_model: Network):
    layout = tiny.layout(tiny_model)
    other = dataclasses.replace(TURNS[1], regions=(tiny.square(24, 24, 64, 64),))
    one, two = (
        answers(tiny_model, collate([tiny.row(t)], tiny_model.tokenizer, layout)) for t in (TURNS[1], other)
    )
    assert one.shape == two.shape  # as many cells
    assert (one - two).abs().max() > 1e-3


def test_the_loss_of_packed_rows_is_that_of_separate_ones(
    tiny_model: Network, monkeypatch: pytest.MonkeyPatch
):
    """Equal numbers of tokens and masks, so the mean of two losses is the loss of both. Points are fixed:
    they are drawn otherwise."""
    from ans_core import losses

    fixed = torch.rand(1, 500, 2, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        losses, "uncertain_points", lambda logits, points, seeds: fixed.expand(len(logits), -1, -1)
    )
    layout, module = (
        tiny.layout(tiny_model),
        Supervised(tiny_model, mask_weight=2.0, dice_weight=0.5, points=500),
    )
    turns = (
        TURNS[0],
        dataclasses.replace(
            TURNS[0], question="Can you segment it?", masks=((tiny.square(30, 30, 50, 64),),)
        ),
    )
    both, read = module(collate([tiny.row(*turns)], tiny_model.tokenizer, layout))
    (found,) = read_together([read])
    losses_alone = [module(collate([tiny.row(t)], tiny_model.tokenizer, layout))[0] for t in turns]
    assert both.item() == pytest.approx(sum(x.item() for x in losses_alone) / 2, rel=1e-4)
    assert both.item() == pytest.approx(found["text"] + 2 * found["bce"] + 0.5 * found["dice"], rel=1e-5)


def test_a_token_is_learned_from_the_place_before_it(tiny_model: Network):
    batch = collate(
        [tiny.row(*TURNS), tiny.row(TURNS[1], number=1)], tiny_model.tokenizer, tiny.layout(tiny_model)
    )
    _, found = Supervised(tiny_model, mask_weight=0.0, dice_weight=0.0, points=10)(batch)
    expected = torch.nn.functional.cross_entropy(answers(tiny_model, batch), batch.input_ids[batch.loss_mask])
    assert found["text"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_conversation_longer_than_the_context_is_refused_by_name(tiny_model: Network):
    layout = tiny.layout(tiny_model, max_length=40)
    with pytest.raises(
        ValueError, match=r"drawn/i0: a conversation of \d+ tokens > max_length 40; use fewer"
    ):
        encode_row(tiny.row(*TURNS), tiny_model.tokenizer, layout, grids=[(4, 4)])


def test_questions_that_fit_into_a_row_together_are_asked_and_the_others_named(tiny_model: Network):
    layout = tiny.layout(tiny_model)
    tokenizer, row = tiny_model.tokenizer, tiny.row(*TURNS)
    whole = encode_row(row, tokenizer, layout, grids=[(4, 4)]).ids
    without_last = len(encode_row(tiny.row(*TURNS[:-1]), tokenizer, layout, grids=[(4, 4)]).ids)
    assert (
        encode_row(row, tokenizer, tiny.layout(tiny_model, max_length=len(whole)), grids=[(4, 4)]).ids
        == whole
    )
    exact = tiny.layout(tiny_model, max_length=without_last)
    found, (left_out,) = collate_readable([row], tokenizer, exact)
    assert found.input_ids.shape[1] <= -(-without_last // exact.multiple) * exact.multiple
    assert left_out.samples == 1
    assert left_out.reason.startswith(
        f"drawn/i0: {len(TURNS)} conversations of {len(whole)} tokens together > max_length"
    )


@pytest.mark.parametrize("template", prompts.TEMPLATES)
def test_a_conversation_of_several_turns_is_one_text_of_which_all_answers_are_learned(
    tiny_model: Network, template: str
):
    """The text is put together as prefill.py does it for prediction."""
    made, tokenizer = turn(CHAT, random.Random(0)), tiny_model.tokenizer
    layout = dataclasses.replace(tiny.layout(tiny_model), template=template)
    row = encode_row(tiny.row(made), tokenizer, layout, grids=[(4, 4)])
    request, written = vqa_loop.request(CHAT), prompts.TEMPLATES[template]
    text = "".join(
        written.user.format(input=q) + a + written.suffix + written.separator for q, a in request.past
    )
    text += written.user.format(input=request.text) + made.answer + written.suffix
    shown = prompts.image_text([16]) + prompts.region_text([int(data.region_cells(made, (4, 4))[0].sum())])
    assert row.ids == tokenizer.encode(text.replace("<image>", shown))
    learned = [i for i, learned in zip(row.ids, row.learned, strict=True) if learned]
    assert tokenizer.decode(learned) == f"a red square{written.suffix}no{written.suffix}"
    assert row.positions == list(range(len(row.ids)))


def test_what_is_learned_is_the_answer_and_its_end(tiny_model: Network):
    batch = collate([tiny.row(TURNS[0])], tiny_model.tokenizer, tiny.layout(tiny_model))
    assert tiny_model.tokenizer.decode(batch.input_ids[batch.loss_mask]) == "It is [SEG].<|im_end|>"
    told = tiny_model.tokenizer.decode(batch.input_ids[0][~batch.loss_mask[0]])
    assert told == (
        "<|im_start|>user\n<img>"
        + "<IMG_CONTEXT>" * 16
        + "</img>\nPlease segment the red square in this image.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_seg_is_paired_with_its_frame_and_its_mask(tiny_model: Network):
    """Row 0: one [SEG], a caption without, two [SEG]s. Row 1: no mask, no frame. Row 2: one [SEG] on the
    second picture."""
    none = Turn(question="Please segment the cow.", answer=prompts.NO_TARGET_ANSWER)
    rows = [tiny.row(*TURNS), tiny.row(none, number=1), tiny.row(TURNS[0], number=2)]
    batch = collate(rows, tiny_model.tokenizer, tiny.layout(tiny_model))
    assert batch.pair_seg.tolist() == [0, 1, 2, 3]
    assert batch.pair_frame.tolist() == [0, 0, 0, 1]
    assert batch.sam_frames.shape == (2, 3, 64, 64)
    assert not torch.equal(batch.sam_frames[0], batch.sam_frames[1])
    segs = (batch.input_ids == tiny_model.seg_token_id) & batch.loss_mask
    assert segs.sum(1).tolist() == [3, 0, 1]
    # at 32 x 32, a quarter of the pixels: 16x16, 8x64, 32x8, 16x16
    areas = [t.sum().item() for t in batch.targets]
    assert areas == [64, 128, 64, 64]
    # 40 of 64 pixels: nearest cells at 0, 16, 32
    assert [[int(r.sum()) for r in row] for row in batch.regions] == [[9], [], []]
    assert [len(views.grids) for views in batch.views] == [1, 1, 1]


def test_a_batch_without_masks_encodes_no_frame(tiny_model: Network):
    batch = collate([tiny.row(TURNS[1])], tiny_model.tokenizer, tiny.layout(tiny_model))
    assert (len(batch.sam_frames), len(batch.targets), len(batch.pair_seg)) == (0, 0, 0)
    _, found = Supervised(tiny_model, mask_weight=1.0, dice_weight=1.0, points=10)(batch)
    assert set(found) == {"text"}


def test_a_grounded_caption_pairs_each_phrase_with_its_own_mask(tiny_model: Network):
    sample = tiny.sample(
        task="grounded_caption", text="a cat on a mat", phrases=((0, 5), (9, 14)),
        masks=((tiny.square(0, 0, 16, 16),), (tiny.square(32, 32, 64, 64),)),
    )  # fmt: skip
    made = turn(sample, random.Random(0))
    assert made.answer == "<p> a cat </p> [SEG] on <p> a mat </p> [SEG]."
    batch = collate([tiny.row(made)], tiny_model.tokenizer, tiny.layout(tiny_model))
    assert batch.pair_seg.tolist() == [0, 1]
    assert [t.sum().item() for t in batch.targets] == [64, 256]
    assert batch.targets[0, :8, :8].all()


def test_a_clip_pairs_its_seg_with_every_chosen_frame_that_is_annotated(tiny_model: Network):
    """Frames 1 and 3 of four are chosen. The first object is known in both (absent in 3), the second only in
    3."""
    first = (None, tiny.square(0, 0, 16, 16), None, rle.empty(64, 64))
    second = (tiny.square(0, 0, 64, 64), None, None, tiny.square(0, 0, 32, 32))
    asked = Turn(question="Both?", answer="[SEG] [SEG]", masks=(first, second))
    frames = (tiny.picture(1), tiny.picture(3))
    batch = collate(
        [Row(name="c", frames=frames, turns=(asked,), mask_frames=(1, 3))],
        tiny_model.tokenizer,
        tiny.layout(tiny_model),
    )
    assert list(zip(batch.pair_seg.tolist(), batch.pair_frame.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 1),
    ]
    assert [t.sum().item() for t in batch.targets] == [64, 0, 256]
    assert [len(views.grids) for views in batch.views] == [2]
    assert (batch.input_ids == tiny_model.image_token_id).sum() == 32


def test_a_seg_in_the_question_draws_nothing(tiny_model: Network):
    asked = dataclasses.replace(TURNS[0], question="What does [SEG] mean?")
    batch = collate([tiny.row(asked)], tiny_model.tokenizer, tiny.layout(tiny_model))
    module = Supervised(tiny_model, mask_weight=1.0, dice_weight=1.0, points=10)
    hidden = tiny_model.hidden_states(packed(batch), image_tokens(tiny_model, batch.views).split(batch.views))
    assert len(module.decode_masks(batch, hidden).logits) == 1


def test_image_slots_and_image_tokens_must_agree(tiny_model: Network):
    ids = torch.full((1, 5), tiny_model.image_token_id)
    with pytest.raises(
        ValueError, match="row 0: the text has 5 image slots, the pictures and regions give 16 tokens"
    ):
        tiny_model.embed(ids, [ImageFeatures(values=torch.zeros(16, 32), grids=((4, 4),))], [])


def test_the_tokens_of_a_region_are_the_pictures_own_at_its_cells(tiny_model: Network):
    tile = ImageFeatures(values=torch.randn(16, 32), grids=((4, 4),))
    region = torch.zeros(4, 4, dtype=torch.bool)
    region[1, 2] = region[3, 0] = True
    embeds = tiny_model.embed(torch.full((1, 18), tiny_model.image_token_id), [tile], [[region]])
    assert torch.equal(embeds[0, :16], tile.values)
    assert torch.equal(embeds[0, 16:], tile.values[[6, 12]])


def test_mask_targets_are_resized_to_the_nearest_pixel():
    mask = np.zeros((4, 4), bool)
    mask[0, 0] = mask[2, 2] = True
    assert data.resize_mask(mask, 2).tolist() == [[True, False], [False, True]]
